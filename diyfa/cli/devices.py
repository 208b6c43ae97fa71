"""The device, the backend and the dtype that a command uses."""

from __future__ import annotations

import torch
import typer

from diyfa.device import present_device
from diyfa.registry import backend_names, load_backend

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def device_for(backend: str | None) -> tuple[torch.device, str]:
    """Return the device and the backend's name. Raises typer.BadParameter if the named backend cannot run here."""
    device = present_device()
    if backend is None or backend == device.type:
        return device, device.type
    if backend not in backend_names():
        raise typer.BadParameter(f"there is no {backend!r}; there are: {', '.join(backend_names())}")
    try:
        device_type = load_backend(backend).device_type
    except Exception as error:  # a broken plug-in may raise anything
        raise typer.BadParameter(f"{backend!r} does not load: {error}") from error
    if device_type not in ("cpu", device.type):
        raise typer.BadParameter(f"{backend!r} needs a device of type {device_type}; here is {device.type}")
    return torch.device(device_type), backend
