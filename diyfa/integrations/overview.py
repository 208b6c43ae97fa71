"""`status`: the installed clients, the integrations that are on, and the targets of their calls."""

from __future__ import annotations

from dataclasses import dataclass, field

from diyfa.integrations import alias, diffusers, pytorch, transformers
from diyfa.integrations.seams import active_handle
from diyfa.npu_stacks import installed_version

# {seam: (distribution of its client, function that switches it on)}
SEAMS = {
    pytorch.SEAM: ("torch", "use_in_pytorch"),
    transformers.SEAM: ("transformers", "use_in_transformers"),
    diffusers.SEAM: ("diffusers", "use_in_diffusers"),
}


@dataclass(frozen=True)
class Status:
    """The state of one integration.

    `installed`: the client's version, or "". `calls`: the number of calls since the integration is on, by target. For
    an alias, the modules imported through it, with 1 each.
    """

    client: str
    installed: str
    switched_on_by: str
    on: bool
    detail: str = ""
    calls: dict[str, int] = field(default_factory=dict)


def _alias_status(package: alias.Package) -> Status:
    name, handle = package.distribution, alias.active_alias(package)
    if handle is None:
        return Status(name, installed_version(name) or "", package.function, False)
    calls = {f"import {module}: diyfa": 1 for module in handle.imported}
    return Status(name, handle.version, package.function, True, "the version that is claimed", calls)


def status() -> list[Status]:
    """Return one row for each integration. Imports none of the clients."""
    rows = []
    for seam, (distribution, function) in SEAMS.items():
        handle = active_handle(seam)
        version = installed_version(distribution) or ""
        if handle is None:
            rows.append(Status(seam, version, function, False))
        else:
            rows.append(Status(seam, version, function, True, handle.detail, dict(handle.calls)))
    return rows + [_alias_status(package) for package in alias.PACKAGES]
