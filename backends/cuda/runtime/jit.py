"""Compilation in a user's call by Triton's compiler. A slow compilation prints a message.

The environment variable DIYFA_JIT allows it ("auto", the default) or forbids it ("never").
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from diyfa.backends.cuda.gluon.inline_ptx import post_processing
from diyfa.backends.cuda.runtime.binaries import StoredBinary, cache_folder, why_unknown
from diyfa.backends.cuda.runtime.launch import COMPILE_OPTIONS, may_compile
from diyfa.backends.cuda.runtime.pack import installed
from diyfa.backends.cuda.runtime.signature import Box, Kinds, Signature, Source, kernel_source

if TYPE_CHECKING:
    from diyfa.problem import Launch

MESSAGE_AFTER = 1.0  # seconds


def triton_source(kernel: Any, source: Source) -> Any:
    """Return `source` as `triton.compile` takes it."""
    names = kernel.arg_names
    if kernel.is_gluon():
        from diyfa.backends.cuda.gluon.compat import GluonASTSource as Wrapped
    else:
        Wrapped = ASTSource
    return Wrapped(
        kernel,
        signature={name: source.types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in source.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in source.aligned},
    )


def compile_for(arch: str, launch: Launch, signature: Signature) -> Any:
    """Return the compiled kernel, from Triton's own cache or its compiler."""
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    source = triton_source(launch.kernel, kernel_source(launch, signature))
    options = {**COMPILE_OPTIONS, **launch.options}
    with post_processing():
        compiled = triton.compile(source, target=target, options=options)
        if "ptx" not in compiled.asm:  # a process that stored only binaries has filled Triton's cache
            triton.knobs.compilation.always_compile = True
            compiled = triton.compile(source, target=target, options=options)
        return compiled


def stored(compiled: Any, kinds: Kinds) -> StoredBinary:
    """Return the binary of a kernel that Triton compiled, for launches with arguments of these kinds."""
    metadata, ptx = compiled.metadata, compiled.asm["ptx"]
    if metadata.global_scratch_size or metadata.num_ctas != 1 or metadata.launch_cooperative_grid:
        raise RuntimeError(f"{metadata.name} needs memory of its own or a cluster, which no kernel here should")
    entry = re.search(r"\.entry[^(]*\((.*?)\)", ptx.decode() if isinstance(ptx, bytes) else ptx, re.DOTALL)
    assert entry, "a compiled kernel has an entry"
    arguments = sum(1 + 2 * len(x.shape) if isinstance(x, Box) else 1 for x in kinds if x not in (None, 1))
    return StoredBinary(
        cubin=compiled.asm["cubin"],
        name=metadata.name,
        shared=metadata.shared,
        num_warps=metadata.num_warps,
        launch_pdl=bool(metadata.launch_pdl),
        boxes=tuple((tuple(x["block_size"]), x["swizzle"]) for x in getattr(metadata, "tensordesc_meta", None) or ()),
        scratch=entry[1].count(".param") - arguments,
    )


def compile_binary(arch: str, launch: Launch, signature: Signature) -> StoredBinary:
    """Compile the kernel of `launch`, without a message, and without a look in the pack and the cache folder."""
    return stored(compile_for(arch, launch, signature), signature.kinds)


def _why_it_is_missing(arch: str) -> str:
    if reason := why_unknown():
        return reason
    pack, folder = installed(arch), cache_folder()
    in_pack = pack.reason if pack.pack is None else f"it is not in {pack.pack.path}"
    return f"{in_pack}, " + (
        "and there is no cache folder" if folder is None else f"nor is the kernel in {folder.path}"
    )


_printed: list[bool] = []
_PRINTING = threading.Lock()


@contextmanager
def _message(arch: str, launch: Launch) -> Iterator[None]:
    """Print a line if the block takes longer than MESSAGE_AFTER, once per process."""

    def print_message() -> None:
        with _PRINTING:  # kernels may be compiled side by side
            if _printed:
                return
            _printed.append(True)
            text = f"diyfa is compiling {launch.kernel.fn.__name__} for {arch}, which takes seconds"
            advice = "Later processes find it there. `diyfa warmup` compiles kernels before a process needs them"
            if cache_folder() is None:
                advice = "DIYFA_CACHE_DIR may name a folder that keeps it for later processes"
            print(f"{text}: {_why_it_is_missing(arch)}. {advice}.", file=sys.stderr, flush=True)

    if _printed:
        yield
        return
    timer = threading.Timer(MESSAGE_AFTER, print_message)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def compile_with_message(arch: str, launch: Launch, signature: Signature) -> StoredBinary:
    """Compile the kernel of `launch` in a user's call, with a message if it is slow.

    Raises:
        RuntimeError: DIYFA_JIT=never.
        ValueError: another value of DIYFA_JIT than `JIT_SETTINGS`.
    """
    if not may_compile():
        refusal = f"DIYFA_JIT=never, and {launch.kernel.fn.__name__} for {arch} would have to be compiled"
        raise RuntimeError(
            f"{refusal}: {_why_it_is_missing(arch)}. Run the call once with DIYFA_JIT=auto: the folder keeps it"
        )
    with _message(arch, launch):
        return compile_binary(arch, launch, signature)
