"""The example engine of docs/serving_engine.py: its tokens are those of a forward pass without a cache."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from scripts import load_script

import diyfa

FILE = Path(__file__).parents[2] / "docs" / "serving_engine.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_script(FILE)


@pytest.mark.parametrize(("pages", "page_size", "chunk"), [(40, 4, 7), (9, 16, 64), (160, 1, 16)])
def test_the_engine_agrees_with_a_forward_without_a_cache(example, pages: int, page_size: int, chunk: int) -> None:
    """Prompts that share beginnings, some longer than a chunk, and more of them than the pages hold at once."""
    config = example.Config(layers=2, hidden=32, heads=4, heads_kv=2, head_dim=8, intermediate=32, positions=64)
    model = example.Model(config)
    prompts = [[5, 7, 9] * 7, [5, 7, 9] * 7 + [1], [5, 7, 9] * 6 + [2, 2], [3], [5, 7, 9] * 7]
    with diyfa.use_backend("cpu"):
        engine = example.Engine(model, pages, page_size, chunk)
        requests = [engine.add(prompt, 2 + 2 * index) for index, prompt in enumerate(prompts)]
        engine.run()
        for request in requests:
            assert request.tokens == example.generate(model, request.prompt, request.new_tokens)
    assert max(request.shared for request in requests) >= 16
    assert sorted(engine.cache.free) == list(range(pages)), "all pages were given back"
    assert not any(engine.cache.users) and not engine.cache.page_of and not engine.cache.prefix_of


def test_too_long_requests_are_refused(example) -> None:
    engine = example.Engine(example.Model(example.Config()), pages=4, page_size=16)
    for prompt, tokens in (([1] * 60, 5), ([], 3), ([1], 0)):
        with pytest.raises(ValueError, match="do not fit the engine"):
            engine.add(prompt, tokens)


def test_the_script_runs(example, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(example, "present_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(example, "generate", lambda model, prompt, count: next(expected))
    expected = iter([[1]])
    with pytest.raises(SystemExit, match="without a cache"):
        example.main()
    assert "43 tokens, 0 of them shared" in capsys.readouterr().out
