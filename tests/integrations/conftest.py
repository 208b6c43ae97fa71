"""Clients that are not here are not collected: `make test-integrations` brings them."""

from __future__ import annotations

from importlib.util import find_spec

CLIENTS = {"transformers": "transformers", "diffusers": "diffusers", "hub_kernel": "kernels", "guide": "diffusers"}
collect_ignore = [f"test_{name}.py" for name, client in CLIENTS.items() if find_spec(client) is None]
