"""Errors of the Hopper kernel on peaked scores beside those of a FlashAttention with a running maximum: a table.

    PYTHONPATH=.:tests:tests/support:tests/hopper python tests/manual/peaked_scores.py [seqlen]

in the Gluon interpreter or on a GPU of that kind.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from test_hopper_hostile import Hostile, added_to_key, attend, running_maximum

import diyfa


def main(seqlen: int) -> None:
    cases = {f"{nats} nats": Hostile(nats=nats) for nats in (1, 3, 5, 8, 12, 20)}
    cases |= {f"a sink of {nats} nats": Hostile(added_to_key(0, nats), nats=1.0) for nats in (10, 16, 30)}
    cases["a key of 16 nats in the middle"] = Hostile(added_to_key(seqlen // 3, 16), nats=1.0)
    print("| scores | mask | norm of the error | largest error | with a running maximum |\n|---|---|---|---|---|")
    for name, case in cases.items():
        for causal in (False, True):
            found = replace(case, causal=causal, seqlen=seqlen)
            with pytest.MonkeyPatch.context() as patch:
                (q, k, v), scale, out, _ = attend(found, 128, patch)
            want = diyfa.reference_attention(q.double(), k.double(), v.double(), **found.mask, sm_scale=scale)
            error, other = (x.double() - want for x in (out, running_maximum(q, k, v, scale, found)))
            print(
                f"| {name} | {'causal' if causal else 'full'} | {error.norm() / other.norm():.2f} | "
                f"{error.abs().max():.1e} | {other.abs().max():.1e} |",
                flush=True,
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1024)
