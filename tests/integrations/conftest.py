"""Clients that are not here are not collected: `make test-integrations` brings them."""

from __future__ import annotations

from importlib.util import find_spec

CLIENTS = {
    "test_transformers.py": "transformers",
    "test_diffusers.py": "diffusers",
    "test_hub_kernel.py": "kernels",
    "test_guide.py": "diffusers",
}
collect_ignore = [name for name, client in CLIENTS.items() if find_spec(client) is None]
