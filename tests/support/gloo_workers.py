"""Processes of one gloo group that run one function after another: PyTorch starts once for all tests of a module."""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing import connection, get_context
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

TIMEOUT = 60  # seconds that a collective waits for a rank


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _serve(rank: int, ranks: int, store: str, timeout: float, pipe: connection.Connection) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:  # as conftest.py
        import fast_interpreter

        fast_interpreter.install()
    if sys.platform == "linux":  # the machine's name need not be known to anybody
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout)
    )
    pipe.send(("ready", b""))
    while True:
        try:
            module, name, arguments = pipe.recv()
        except EOFError:
            break
        try:
            result = getattr(importlib.import_module(module), name)(*arguments)
            pipe.send(("result", _packed(result)))
        except Exception as error:  # the caller judges it
            pipe.send(("error", _packed((type(error).__name__, str(error), traceback.format_exc()))))
    dist.destroy_process_group()


class Failure(Exception):
    """What a worker raised."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}\n{trace}")
        self.kind, self.message = kind, message


class Workers:
    """`ranks` processes; leave its `with` block and they end."""

    def __init__(self, ranks: int, folder: Path, timeout: float = TIMEOUT) -> None:
        context = get_context("forkserver")  # which imports PyTorch once
        context.set_forkserver_preload(["torch._dynamo", "torch.distributed.device_mesh", "diyfa.distributed"])
        pipes = [context.Pipe() for _ in range(ranks)]
        self.pipes = [ours for ours, _ in pipes]
        self.processes = [
            context.Process(target=_serve, args=(rank, ranks, str(folder / "store"), timeout, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        for pipe in self.pipes:
            assert pipe.recv()[0] == "ready"

    def start(self, function: Any, arguments: Sequence[tuple[Any, ...]]) -> None:
        """Let rank n call `function`, of an importable module, with `arguments[n]`."""
        for pipe, rank_arguments in zip(self.pipes, arguments, strict=True):
            pipe.send((function.__module__, function.__name__, rank_arguments))

    def finish(self, ranks: Sequence[int] | None = None) -> list[Any]:
        """What each of `ranks` (all) returned, or the `Failure` it ended in."""
        results: list[Any] = []
        for rank in range(len(self.pipes)) if ranks is None else ranks:
            kind, value = self.pipes[rank].recv()
            value = torch.load(io.BytesIO(value), weights_only=False)
            results.append(Failure(*value) if kind == "error" else value)
        return results

    def run(self, function: Any, *arguments: Any) -> list[Any]:
        """`function(*arguments)` on every rank; the first failure is raised."""
        self.start(function, [arguments] * len(self.pipes))
        results = self.finish()
        for value in results:
            if isinstance(value, Failure):
                raise value
        return results

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
