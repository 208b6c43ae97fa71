"""The Hopper backward without a GPU: right gradients and no undefined behaviour, whatever order things happen in."""

from __future__ import annotations

import pytest
import torch
from hopper_gluon import need_hopper_gluon

need_hopper_gluon()

from hopper_interpreted import interpret_backward, run_backward  # noqa: E402

from diyfa.backends.cuda.hopper import bwd as hopper_bwd  # noqa: E402
from diyfa.backends.cuda.hopper import bwd_configs  # noqa: E402
from diyfa.backends.cuda.runtime.launch import is_interpreting  # noqa: E402
from diyfa.problem import AttentionGradients, AttentionProblem, AttentionTensors  # noqa: E402
from diyfa.testing import AttentionCase  # noqa: E402

pytestmark = pytest.mark.skipif(not is_interpreting(), reason="CPU tensors are refused: here the kernel itself is run")


def case(name: str, **changes) -> AttentionCase:
    sizes = {"batch": 1, "heads": 2, "heads_kv": 1, "seqlen_q": 150, "seqlen_k": 200, "head_dim": 64}
    return AttentionCase(name, **{**sizes, "dtype": "bfloat16", **changes})


CASES = [
    case("full"),
    case("even", seqlen_q=128, seqlen_k=256, heads=1, dtype="float16"),
    case("one_key", seqlen_q=64, seqlen_k=1),
    case("causal_more_keys", causal=True, seqlen_q=70, seqlen_k=330, head_dim=128),
    case("gqa_bshd", heads=4, heads_kv=2, layout="bshd", batch=2, seqlen_q=140, seqlen_k=140, causal=True),
    case("window_both", seqlen_q=330, seqlen_k=300, window=(60, 30), head_dim=128),
    case("softcap_128", softcap=5.0, causal=True, head_dim=128),
    case("sinks", sinks=True, causal=True),
    case("samples", batch=3, seq_lens=(130, 1, 129), seqlen_k=150, causal=True, head_dim=128),
    case("sequences", layout="thd", lens_q=(70, 1, 0, 130), lens_k=(130, 5, 3, 64), causal=True, sinks=True),
    case("sequences_128", layout="thd", lens_q=(65, 200), lens_k=(128, 129), head_dim=128, slack=7),
    case("columns_40", head_dim=40),
    case("large_scores", sm_scale=4.0, causal=True),
]
MORE = [  # each takes seconds; the others have what they have, too
    case("128", head_dim=128),
    case("causal", causal=True, head_dim=128),
    case("causal_more_queries", causal=True, seqlen_q=300, seqlen_k=130),
    case("transposed", view="transposed", causal=True),
    case("packed_qkv", layout="bshd", packing="qkv", heads_kv=2, seqlen_q=160, seqlen_k=160),
    case("window", seqlen_q=330, seqlen_k=330, window=(70, 0)),
    case("softcap", softcap=5.0),
    case("sinks_samples", sinks=True, batch=3, seq_lens=(150, 3, 80), seqlen_k=150),
    case("columns_96", head_dim=96, causal=True, dtype="float16"),
    case("negative_scale", sm_scale=-0.2),
    case("zero_scale", sm_scale=0.0),
]


@pytest.mark.parametrize(
    "case",
    [*(pytest.param(c, id=c.name) for c in CASES), *(pytest.param(c, id=c.name, marks=pytest.mark.slow) for c in MORE)],
)
def test_gradients(case: AttentionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = interpret_backward(monkeypatch, seed=3)
    assert not run_backward(case)
    assert kernel.launches == 1


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 6))])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_interleaving(head_dim: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_backward(monkeypatch, seed=seed, interleave=True)
    assert not run_backward(case("small", head_dim=head_dim, seqlen_q=200, seqlen_k=130, causal=True))


REFUSED = {
    "alibi": {"alibi": True},
    "attn_bias": {"bias": "float16"},
    "dropout": {"dropout": True},
    "order in which programs come": {"deterministic": True},
    "head_dim_v": {"head_dim_v": 32},
    "multiples of 8 from": {"head_dim": 256, "head_dim_v": 256},
    "16 bytes": {"aligned": False},
    "float32": {"dtype": "float32"},
    "sm_80": {"arch": "sm_80"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_it_refuses(words: str) -> None:
    problem = AttentionProblem("cuda", "sm_90", "bfloat16", "bhsd", 1, 4, 2, 512, 512, 64, 64)
    assert bwd_configs.refuses(problem) is None
    assert words in (bwd_configs.refuses(problem.replace(**REFUSED[words])) or "")


def test_a_gradient_that_tma_cannot_read_goes_to_the_portable_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = interpret_backward(monkeypatch)
    calls = []
    monkeypatch.setattr(hopper_bwd.portable, "attention_backward", lambda *arguments: calls.append(arguments))
    problem = AttentionProblem("cuda", "sm_90", "bfloat16", "bhsd", 1, 1, 1, 64, 64, 64, 64)
    q, k, v, out = (torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16) for _ in range(4))
    dout = torch.zeros(64 * 64 + 1, dtype=torch.bfloat16)[1:].view(1, 1, 64, 64)
    gradients = AttentionGradients(*(torch.empty_like(x) for x in (q, k, v)))
    arguments = (problem, AttentionTensors(q, k, v, 1.0), out, torch.zeros(1, 1, 64), dout, None, gradients)
    hopper_bwd.attention_backward(*arguments)
    assert calls == [arguments] and kernel.launches == 0
