"""The pinned list of refusals, `refusals.txt`: what each backend may say no to, and with which words.

`python tests/support/refusals.py BACKEND…` writes the sections of these backends anew. Nothing is launched and no
device is needed: on CPU tensors a backend answers for the architecture that its interpreter stands for (or DIYFA_ARCH).
What changed shows in the diff of the file, where it is reviewed.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

FILE = Path(__file__).parent / "refusals.txt"
ANY, ONLY = "*", "only"
_NOT_IMPLEMENTED = re.compile(r"does not implement (.+)$")


def read_refusals() -> dict[tuple[str, str, str], str]:
    """Reason by (backend or backend@arch, variant or "*", case); the features that there are by (…, …, "only")."""
    refusals: dict[tuple[str, str, str], str] = {}
    for line in FILE.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        names, reason = line.split(": ", 1)
        backend, variant, case = names.split()
        if (backend, variant, case) in refusals:
            raise ValueError(f"refusals.txt lists {names} twice")
        refusals[backend, variant, case] = reason
    return refusals


REFUSALS = read_refusals()


def refusal(backend: str, arch: str, variant: str, case: str) -> str | None:
    """What `backend` must say when `variant` is asked to run `case`; None when it must run."""
    for who in (f"{backend}@{arch}", backend):
        for pattern in (variant, ANY):
            if (who, pattern, case) in REFUSALS:
                return REFUSALS[who, pattern, case]
    return _lacking(backend, variant, case)


def _lacking(backend: str, variant: str, case: str) -> str | None:
    """What the kernel `variant` must say where the case has features that the list's line "only" does not name."""
    only = REFUSALS.get((backend, variant, ONLY))
    if only is None:
        return None
    from cases import CASES
    from described_cases import case_problem

    missing = sorted(case_problem(CASES[case]).features - set(only.split()))
    return f"{variant} does not implement {', '.join(missing)}" if missing else None


def refused_features(backend: str) -> set[str]:
    """Names of the features that the list lets all kernels of `backend` do without."""
    features: set[str] = set()
    for (who, variant, _), reason in REFUSALS.items():
        if who.split("@")[0] == backend and variant in (ANY, "auto") and (match := _NOT_IMPLEMENTED.search(reason)):
            features |= set(match.group(1).split(", "))
    return features


# ---- Writing the list ---------------------------------------------------------------------------------------------


class _Accepted(Exception):
    """Raised where a call would be launched."""


def _refused_now(backend: str) -> Iterator[tuple[str, str, str]]:
    """(variant, case, reason) of everything in the table that `backend` refuses."""
    from cases import CASES
    from targets import SPECIALISED

    from diyfa import registry
    from diyfa.testing import attention_function, make_inputs

    choose = registry.choose

    def choose_only(op, problem, chosen, variant="auto"):
        choose(op, problem, chosen, variant)
        if problem.needs_grad:
            choose("attention_bwd", problem, chosen)
        raise _Accepted

    kernels = [kernel for kernel in registry.kernels_for(backend) if kernel not in SPECIALISED]
    for case in CASES.values():
        inputs = make_inputs(case)
        reasons: dict[str, str] = {}
        for variant in ("auto", *(kernels if case.all_variants else ())):
            try:
                with mock.patch.object(registry, "choose", choose_only):
                    attention_function(case, backend=backend, variant=variant)(*inputs.leaves, **inputs.options)
            except _Accepted:
                continue
            except ValueError as error:  # "... cannot run this attention_fwd: v2: REASON; v1: REASON"
                reasons[variant] = str(error).split(": ", 2)[2].split("; ")[0]
            else:
                raise AssertionError(f"{case.name} ran without choosing a kernel")
        variants = 1 + len(kernels) * case.all_variants
        if len(reasons) == variants and len(set(reasons.values())) == 1:
            yield ANY, case.name, reasons["auto"]
        else:
            for variant, reason in reasons.items():
                if reason != _lacking(backend, variant, case.name):
                    yield variant, case.name, reason


def write_refusals(backends: list[str]) -> None:
    """Replace the sections of `backends`; a section is a comment with the backend's name in capitals and its lines."""
    head, *sections = re.split(r"\n(?=# [A-Z]+\n)", FILE.read_text())
    text = {re.match(r"# ([A-Z]+)", section).group(1).lower(): section for section in sections}
    for backend in backends:
        old_lines = text.get(backend, "").splitlines()
        kept_lines = [line for line in old_lines if line.startswith(f"{backend}@") or f" {ONLY}: " in line]
        cache = [line for line in old_lines if line.startswith(f"{backend} * kvcache_")]  # written by hand
        lines = [f"{backend} {variant} {case}: {reason}" for variant, case, reason in _refused_now(backend)]
        text[backend] = "\n".join([f"# {backend.upper()}", *kept_lines, *lines, *cache, ""])
    FILE.write_text("\n".join([head, *text.values()]))


if __name__ == "__main__":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # CPU tensors stand for the device's
    sys.path.insert(0, str(Path(__file__).parents[2]))
    if not sys.argv[1:]:
        sys.exit(__doc__)
    write_refusals(sys.argv[1:])
