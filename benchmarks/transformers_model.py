"""Benchmark of a Llama-shaped model of a billion parameters in Transformers, with each attention implementation.

    python benchmarks/transformers_model.py [--attention sdpa flash_attention_2 diyfa batch_invariant] [--shrink 16]

Each attention has three rows: a training step (forward, loss and backward, 2 × 4096 tokens), a prefill of 8192 tokens,
and a generated token after a prompt of 4096 (dynamic cache, batch of 8). Implementations alternate. Weights are random,
bfloat16. On CUDA "flash_attention_2" is diyfa, too, through `alias_flash_attn`, as an unchanged program would use it;
--real-flash-attn uses the installed flash_attn instead. "batch_invariant" is diyfa inside `diyfa.batch_invariant()`; it
runs only if it is named. `--shrink` divides sizes, to try the benchmark without a GPU.

Needs transformers. Writes one JSON file with device, date and versions to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import diyfa
from diyfa.device import default_backend
from diyfa.integrations import alias_flash_attn, status, use_in_transformers
from diyfa.lab.bench.record import default_path, write_json
from diyfa.lab.bench.timing import compute_quantiles, synchronize, time_calls

RESULTS = Path(__file__).parent / "results"
ATTENTIONS = ("sdpa", "flash_attention_2", "diyfa")
INVARIANT = "batch_invariant"


def parse_model(attention: str, device: torch.device, shrink: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=2048 // shrink, intermediate_size=8192 // shrink, num_hidden_layers=max(2, 16 // shrink),
        num_attention_heads=max(1, 32 // shrink), num_key_value_heads=max(1, 8 // shrink), head_dim=64,
        vocab_size=32000 // shrink, max_position_embeddings=16384, eos_token_id=None,
    )  # fmt: skip
    with torch.device(device):
        return LlamaForCausalLM._from_config(config, attn_implementation=attention, dtype=torch.bfloat16)


def works_of(model: Any, device: torch.device, shrink: int) -> dict[str, Callable[[], Any]]:
    """Return {name: call} of training step and prefill. `milliseconds_of_a_token` times generation."""

    def tokens(batch: int, length: int) -> torch.Tensor:
        return torch.randint(3, model.config.vocab_size, (batch, length // shrink), device=device)

    train, prompt = tokens(2, 4096), tokens(1, 8192)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(train, labels=train, use_cache=False).loss.backward()

    def prefill() -> None:
        with torch.no_grad():
            model(prompt, use_cache=True, logits_to_keep=1)

    return {"training step": step, "prefill": prefill}


def milliseconds_of_a_token(model: Any, device: torch.device, shrink: int, count: int) -> float:
    """Return the milliseconds of one generated token, the mean of `count` after the first."""
    prompt = torch.randint(3, model.config.vocab_size, (8, 4096 // shrink), device=device)
    seconds = []
    for new in (1, 1 + count):  # the difference of both times is without the prompt
        synchronize(device)
        start = time.perf_counter()
        model.generate(prompt, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return (seconds[1] - seconds[0]) / count * 1e3


def measured(model: Any, device: torch.device, shrink: int, rep: int) -> dict[str, float]:
    """Return {work: milliseconds}, each the median of `rep` calls, and the time of a generated token."""
    found = {
        name: compute_quantiles(time_calls(work, device, 3, rep), [0.5])[0]
        for name, work in works_of(model, device, shrink).items()
    }
    return found | {"a generated token": milliseconds_of_a_token(model, device, shrink, 64 // shrink)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", nargs="+", default=ATTENTIONS)
    parser.add_argument("--rep", type=int, default=10, help="calls of one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--real-flash-attn", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = torch.device(default_backend())
    if "flash_attention_2" in arguments.attention and not arguments.real_flash_attn:
        alias_flash_attn()  # before transformers is imported
    use_in_transformers()
    attentions = [x for x in arguments.attention if x != "flash_attention_2" or device.type == "cuda"]
    models = {
        attention: parse_model("diyfa" if attention == INVARIANT else attention, device, arguments.shrink)
        for attention in attentions
    }
    times: dict[tuple[str, str], list[float]] = {}
    with diyfa.use_backend("cpu") if device.type == "cpu" else nullcontext():
        for turn in range(1 + arguments.rounds):  # the first round compiles the kernels and does not count
            for attention, model in models.items():
                with diyfa.batch_invariant() if attention == INVARIANT else nullcontext():
                    found = measured(model, device, arguments.shrink, arguments.rep)
                for work, ms in found.items():
                    if turn:
                        times.setdefault((work, attention), []).append(ms)
                model.zero_grad(set_to_none=True)
    rows: list[dict[str, Any]] = []
    for (work, attention), ms in times.items():
        rows.append(
            {
                "kind": "model",
                "work": work,
                "implementation": attention,
                "ms": compute_quantiles(ms, [0.5])[0],
                "rounds": ms,
            }
        )
        print(f"{work:20}{attention:20}{rows[-1]['ms']:10.2f} ms   {min(ms):.2f} to {max(ms):.2f}")
    print(next(row.calls for row in status() if row.client == "transformers"))
    path = arguments.output or default_path("transformers", device, RESULTS)
    write_json(path, "transformers", device, rows, shrink=arguments.shrink)
    print(path)


if __name__ == "__main__":
    main()
