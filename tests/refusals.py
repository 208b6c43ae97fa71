"""The pinned list of refusals, `refusals.txt`: what each backend may say no to, and with which words."""

from __future__ import annotations

import re
from pathlib import Path

ANY = "*"
_NOT_IMPLEMENTED = re.compile(r"does not implement (.+)$")


def read_refusals() -> dict[tuple[str, str, str], str]:
    """Reason by (backend or backend@arch, variant or "*", case)."""
    refusals: dict[tuple[str, str, str], str] = {}
    for line in (Path(__file__).parent / "refusals.txt").read_text().splitlines():
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
        for which in (variant, ANY):
            if (who, which, case) in REFUSALS:
                return REFUSALS[who, which, case]
    return None


def refused_features(backend: str) -> set[str]:
    """Names of the features that the list lets all kernels of `backend` do without."""
    found: set[str] = set()
    for (who, variant, _), reason in REFUSALS.items():
        if who.split("@")[0] == backend and variant in (ANY, "auto") and (match := _NOT_IMPLEMENTED.search(reason)):
            found |= set(match.group(1).split(", "))
    return found
