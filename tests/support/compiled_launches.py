"""Launches of kernels that are compiled for sm_90, to a list: what the driver is handed.

`python compiled_launches.py FOLDER CASE …` prints {case: what it found} as JSON. Needs Triton without its interpreter.
"""

from __future__ import annotations

import json
import struct
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from simulators.cuda_driver import STREAM, Recorded, Simulated, install

import diyfa
from diyfa import ops, registry
from diyfa import plan as planning
from diyfa.backends.cuda.attention import stream_k
from diyfa.backends.cuda.hopper import configs as hopper_configs
from diyfa.backends.cuda.runtime import jit, launcher, passes, tune
from diyfa.backends.cuda.runtime.driver import Driver
from diyfa.backends.cuda.runtime.signature import Tiles, launch_signature, shared_box
from diyfa.problem import Launch

SMALL, LARGE = (2, 4, 96, 64), (4, 8, 2048, 64)  # the second is worth its descriptors
ATTENTION: dict[str, tuple[tuple[int, ...], torch.dtype, dict[str, Any], bool]] = {  # shape, dtype, options, gradients?
    "absent tensors": (SMALL, torch.bfloat16, {"sinks": torch.rand(4), "window": (20, 0)}, False),
    "backward": (SMALL, torch.bfloat16, {}, True),
    "packed": (SMALL, torch.bfloat16, {"sinks": torch.rand(4)}, True),
    "descriptors": (LARGE, torch.float16, {"variant": "v2"}, False),
    "descriptors of gluon": (LARGE, torch.bfloat16, {"causal": True, "variant": "sm90"}, False),
}
CALLS = 4  # the first two are described; what repeats them is prepared in the second
MIN_ADDRESS = 2**40


def by_name(launches: list[Recorded], tensors: dict[str, torch.Tensor | None]) -> list[list[Any]]:
    """Launches of one call with names instead of addresses; memory of its own is numbered."""
    names = {x.data_ptr(): name for name, x in tensors.items() if x is not None}
    named = []
    for launch in launches:
        parameters: list[Any] = []
        for parameter in launch.parameters:
            words = struct.unpack(f"<{len(parameter) // 8}Q", parameter) if len(parameter) % 8 == 0 else ()
            for word in words[:1]:
                if word >= MIN_ADDRESS:
                    names.setdefault(word, f"memory {len(names)}")
            parameters.append([names.get(word, word) for word in words] or parameter.hex())
        named.append([*launch.shape, launch.stream, *launch.attributes, *parameters])
    return named


class Described:
    """The launches that the launcher was asked for, not those that were repeated."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.passes: list[bool] = []
        launch_kernel, bind = launcher.launch_kernel, ops.bind

        def spy(launch: Launch) -> None:
            self.launches.append(launch)
            launch_kernel(launch)

        for module in list(sys.modules.values()):
            if getattr(module, "launch_kernel", None) is launch_kernel:
                module.launch_kernel = spy  # type: ignore[attr-defined]
        ops.bind = lambda *args: self.passes.append(True) or bind(*args)  # type: ignore[func-returns-value]


def launch_by_triton(launch: Launch) -> None:
    """Launch the same binary by Triton's launcher."""
    compiled = jit.compile_for("sm_90", launch, launch_signature(launch))
    values = {**launch.arguments, **launch.constants}
    arguments = [values[name] for name in launch.kernel.arg_names]
    grid = launch.grid if isinstance(launch.grid, tuple) else (launch.grid,)
    compiled[(*grid, 1, 1)[:3]](*[x.for_triton() if type(x) is Tiles else x for x in arguments])


def attention(case: str, driver: Simulated, described: Described) -> dict[str, Any]:
    """launches: those of each call; described: whether it was; as_triton: which launches Triton makes so, too."""
    shape, dtype, options, has_gradients = ATTENTION[case]
    launched, calls, anew, as_triton = [], [], [], []
    for number in range(CALLS):
        q, k, v = (torch.zeros(shape, dtype=dtype) for _ in range(3))
        if case == "packed":  # a sequence for each sample
            q, k, v = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (q, k, v))
        q, k, v = (x.requires_grad_(has_gradients) for x in (q, k, v))
        tensors: dict[str, torch.Tensor | None] = {"q": q, "k": k, "v": v, "sinks": options.get("sinks")}
        attend: Callable[..., Any] = partial(diyfa.flash_attention, q, k, v)
        if case == "packed":
            length = shape[2]
            ends = [torch.arange(0, 1 + q.shape[0], length, dtype=torch.int32) for _ in range(2)]
            tensors |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True))
            attend = partial(diyfa.flash_attention_varlen, q, k, v, *ends, length, length)
        for seen in (driver.launches, described.launches, described.passes):
            seen.clear()
        out, lse = attend(backend="cuda", return_lse=True, **options)
        tensors |= {"out": out, "lse": lse}
        if has_gradients:
            tensors["dout"] = torch.zeros_like(out)
            grads = torch.autograd.grad(out, (q, k, v), tensors["dout"])
            tensors |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
        launched.append(tensors)  # so that no address comes twice
        ours = list(driver.launches)
        calls.append(by_name(ours, tensors))
        anew.append(bool(described.passes))
        if not number:
            kernels = [launch.kernel.__name__ for launch in described.launches]
            driver.launches.clear()
            for launch in described.launches:
                launch_by_triton(launch)
            as_triton = [a == b for a, b in zip(ours, driver.launches, strict=True)]
    return {"launches": calls, "described": anew, "as_triton": as_triton, "kernels": kernels}


def lengths(driver: Simulated, described: Described) -> dict[str, Any]:
    """How many kernels were compiled for calls of other lengths, batches and strides, one after the other."""
    compiled: list[int] = []
    compile_it = triton.compile
    count = []
    triton.compile = lambda *args, **options: count.append(1) or compile_it(*args, **options)
    for batch, rows in ((2, 96), (2, 97), (3, 112), (1, 90), (5, 81)):
        count.clear()
        packed = torch.zeros(batch, rows, 3 * 4, 64, dtype=torch.bfloat16)
        tensors = packed.chunk(3, 2) if batch == 5 else (packed[:, :, :4],) * 3
        with diyfa.use_backend("cuda"):
            diyfa.flash_attn_func(*tensors)
        compiled.append(len(count))
    return {"compiled": compiled}


def a_launch(x: torch.Tensor) -> Launch:
    """Of a small kernel that reads rows of x through a descriptor, one number of x, and two numbers."""
    return Launch(
        rows_kernel,
        (2, 3),
        {"rows": Tiles(x, x.shape, x.stride(), shared_box(x.dtype, (16, 16))), "x_ptr": x, "n": 5, "s": 0.5},
        {"BLOCK": 16},
        {},
    )


@triton.jit
def rows_kernel(rows, x_ptr, n, s, BLOCK: triton.language.constexpr):
    tile = rows.load([n * BLOCK, 0]).to(triton.language.float32) * s
    offs = triton.language.arange(0, BLOCK)
    triton.language.store(x_ptr + offs[:, None] * BLOCK + offs[None, :], tile.to(x_ptr.dtype.element_ty))


def threads(driver: Simulated, described: Described) -> dict[str, Any]:
    """How many launches of one binary had the parameters of each of eight threads: 100, side by side, are right."""
    right, counts = Counter[int](), Counter[int]()
    small = torch.zeros(64, 16, dtype=torch.float16)
    passes.current_stream = lambda device: 78
    replay = passes.make_replay(passes.Pass([a_launch(small)]), [small], [], lambda: None, ["n"])
    assert replay is not None
    tensors = [torch.zeros(64 + i, 16, dtype=torch.float16) for i in range(8)]
    driver.libcuda.simulator_need_contexts(1)

    def run(number: int) -> None:
        x = tensors[number]
        launch = a_launch(x)._replace(grid=(number + 1,))
        launch.arguments["n"] = number
        started.wait()
        for _ in range(50):
            launcher.launch_kernel(launch)
            replay([x.data_ptr(), number])
            encoded = launcher.driver().encode(launch.arguments["rows"], x.data_ptr(), [16, 16], 0)
            right[number] += struct.unpack_from("<4Q", encoded)[::3] == (x.data_ptr(), 64 + number)

    sys.setswitchinterval(1e-6)
    started = threading.Barrier(8)
    driver.launches.clear()
    pool = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    driver.libcuda.simulator_need_contexts(0)
    passes.current_stream = lambda device: STREAM
    for one in driver.launches:
        number = struct.unpack("<i", one.parameters[-4])[0]
        x = tensors[number]
        address, _, _, rows, *_ = struct.unpack("<16Q", one.parameters[0])
        is_right = address == x.data_ptr() and one.parameters[5] == struct.pack("<Q", address)
        is_right &= one.stream == 78 or (one.shape[0] == number + 1 and rows == 64 + number)
        counts[number] += is_right
    return {"launches": [counts[i] for i in range(8)], "maps": [right[i] for i in range(8)]}


def errors(driver: Simulated, described: Described) -> dict[str, Any]:
    """What is raised where the driver fails."""
    messages = []
    x = torch.zeros(64, 16, dtype=torch.float16)
    launcher.launch_kernel(a_launch(x))
    for result in (700, 999):
        driver.libcuda.simulator_fail(result)
        try:
            launcher.launch_kernel(a_launch(x))
        except RuntimeError as error:
            messages.append(str(error))
    driver.libcuda.simulator_fail(0)
    driver.launches.clear()
    launcher.launch_kernel(a_launch(x))
    return {"errors": messages, "launches_afterwards": len(driver.launches)}


def moved_maps(one: Driver, device: str = "cpu") -> list[bool]:
    """Whether the tensor map of one tensor becomes that of another by its address: of less than 128 KB and more."""
    found = []
    for rows in (64, 8192):
        x, y = (torch.zeros(rows, 16, dtype=torch.float16, device=device) for _ in range(2))
        tiles = [Tiles(each, each.shape, each.stride(), shared_box(each.dtype, (16, 16))) for each in (x, y)]
        of_x, of_y = (one.encode(each, each.base.data_ptr(), [16, 16], 2) for each in tiles)
        found.append(of_x != of_y == one.moved(of_x, y.data_ptr()))
    return found


def small_maps(driver: Simulated, described: Described) -> dict[str, Any]:
    """Bit 21 of the second word of tensor maps of less than 128 KB and more, by older and newer drivers' versions."""
    results, moved = [], []
    for version in (13010, 13020):
        driver.libcuda.simulator_set_version(version)
        one = Driver()
        moved += moved_maps(one)
        for rows in (64, 8192):
            x = torch.zeros(rows, 16, dtype=torch.float16)
            tiles = Tiles(x, x.shape, x.stride(), shared_box(x.dtype, (16, 16)))
            results.append(struct.unpack_from("<Q", one.encode(tiles, x.data_ptr(), [16, 16], 2), 8)[0] >> 21 & 1)
    return {"bits": results, "moved": moved}


OTHER_CASES = {"lengths": lengths, "threads": threads, "errors": errors, "small maps": small_maps}


def main() -> None:
    folder, *cases = sys.argv[1:]
    driver = install(Path(folder))
    tune._tuner.enabled = False
    hopper_configs.environment_refusal = lambda: None
    for module in (hopper_configs, stream_k):
        module.multiprocessors = lambda device: 132  # type: ignore[assignment]
    type(registry.load_backend("cuda")).accepts = lambda self, device: None  # type: ignore[method-assign]
    diyfa.flash_attention(*[torch.zeros(1, 1, 16, 16, dtype=torch.float16)] * 3, backend="cuda")  # loads all modules
    described, results = Described(), {}
    for case in cases:
        planning.plans = {}
        results[case] = (
            attention(case, driver, described) if case in ATTENTION else OTHER_CASES[case](driver, described)
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
