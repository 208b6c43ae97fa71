"""`status`: which clients are installed, where diyfa has been put in, and where calls went since."""

from __future__ import annotations

from dataclasses import dataclass, field

from diyfa.integrations import alias, diffusers, pytorch, transformers
from diyfa.integrations.seams import handle_of
from diyfa.npu_stacks import installed_version

# Seam -> the distribution of its client, and what switches it on.
SEAMS = {
    pytorch.SEAM: ("torch", "use_in_pytorch"),
    transformers.SEAM: ("transformers", "use_in_transformers"),
    diffusers.SEAM: ("diffusers", "use_in_diffusers"),
}


@dataclass(frozen=True)
class Status:
    """One place in other software.

    `installed`: the client's version, or "". `calls`: how many went where since diyfa was put in; of an alias, the
    modules that were imported through it, whose functions are diyfa's own.
    """

    client: str
    installed: str
    switched_on_by: str
    on: bool
    detail: str = ""
    calls: dict[str, int] = field(default_factory=dict)


def _of_alias(package: alias.Package) -> Status:
    name, handle = package.distribution, alias.handle_of_alias(package)
    if handle is None:
        return Status(name, installed_version(name) or "", package.function, False)
    calls = {f"import {module}: diyfa": 1 for module in handle.imported}
    return Status(name, handle.version, package.function, True, "the version that is claimed", calls)


def status() -> list[Status]:
    """A row for each place where diyfa can be put in. Imports none of the clients."""
    rows = []
    for seam, (distribution, function) in SEAMS.items():
        handle = handle_of(seam)
        found = installed_version(distribution) or ""
        if handle is None:
            rows.append(Status(seam, found, function, False))
        else:
            rows.append(Status(seam, found, function, True, handle.detail, dict(handle.calls)))
    return rows + [_of_alias(package) for package in alias.PACKAGES]
