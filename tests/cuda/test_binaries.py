"""Binaries outside of a process: packs, the cache folder, and the compiler as the last resort.

Two small kernels are compiled for sm_90 in a process of its own (`stored_binaries.py`), with a simulated driver.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from subprocesses import ROOT, SUPPORT

from diyfa.backends.cuda import backend
from diyfa.backends.cuda.gluon.compat import has_gluon
from diyfa.backends.cuda.runtime import binaries, driver, jit, launcher, pack, passes, tune
from diyfa.backends.cuda.runtime.constants import Constants
from diyfa.backends.cuda.runtime.signature import Tiles, launch_signature, shared_box
from diyfa.problem import Launch

ARCH = "sm_90"


def start(command: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([*map(str, (SUPPORT, ROOT / "tests", ROOT)), os.environ.get("PYTHONPATH", "")])
    environment = {"TRITON_INTERPRET": "0", "PYTHONPATH": path.rstrip(os.pathsep), **environment}
    return subprocess.Popen(
        [sys.executable, str(SUPPORT / "stored_binaries.py"), command, str(folder)],
        env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> dict:
    printed, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return json.loads(printed.splitlines()[-1])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    if torch.cuda.is_available():
        pytest.skip("there is a driver: test_repeat.py runs on the device")
    folder = tmp_path_factory.mktemp("made")
    found = finish(start("make", folder, TRITON_CACHE_DIR=str(folder), DIYFA_CACHE_DIR=str(folder)))
    return SimpleNamespace(**found, file=folder / "site" / "diyfa_sm90" / "binaries.pack", folder=Path(found["cache"]))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """What another process found, with which this one shared a folder."""
    folder = binaries.BinaryFolder(tmp_path_factory.mktemp("shared"))
    process, read = start("share_folder", folder.path, PYTHONHASHSEED="1"), 0
    known = {str(i): binaries.StoredBinary(bytes([i]) * (100_000 + i), "f", 0, 4, False, (), 2) for i in range(8)}
    while process.poll() is None and not (folder.path / "7").exists():
        time.sleep(0.01)
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        for key, one in known.items():
            found = folder.get(key)
            read += found is not None
            assert found in (None, one) and folder.put(key, one)
    return {**finish(process), "read_here": read, "files": sorted(x.name for x in folder.path.iterdir())}


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, tmp_path):
    """A process that has looked for nothing yet."""
    monkeypatch.setenv("DIYFA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "_printed", [])
    monkeypatch.setattr(pack, "_rejected_packs", {})
    for asked in (pack.installed, pack._warn):
        asked.cache_clear()
    yield
    for asked in (pack.installed, pack._warn):
        asked.cache_clear()


@pytest.fixture(scope="module")
def binary():
    return binaries.StoredBinary(b"\x7fELF" * 5000, "f", 1000, 8, True, (((16, 64), 3), ((1, 8, 16), 0)), 2)


@dataclass(frozen=True, eq=False)
class Chosen(Constants):
    rows: int
    name: str
    is_causal: bool
    scale: float


def make_launch(name="f_kernel", constants=None, options=None, aligned=(), **arguments):
    """Of a kernel that is not compiled here."""
    params = [
        SimpleNamespace(name=x, is_constexpr=False, do_not_specialize=False, do_not_specialize_on_alignment=False)
        for x in arguments
    ]

    def function():
        pass

    function.__module__, function.__name__, function.__qualname__ = "diyfa.backends.cuda.attention.fwd", name, name
    kernel = SimpleNamespace(params=params, fn=function)
    constants = constants or {"c": Chosen(64, "causal", True, 0.5)}
    return Launch(kernel, 1, arguments, constants, {"num_warps": 8} if options is None else options, aligned)


def launch_key(launch):
    return binaries.binary_key(ARCH, launch, launch_signature(launch))


# ---- From the compiler, the cache folder and a pack ---------------------------------------------------------------


def test_the_driver_gets_the_same_from_all_three(made):
    """From a pack where nothing may be compiled."""
    assert made.compiled == [["_merge_kernel", "rows_kernel"], [], []]
    assert len(made.launched[0]) == 2 and made.launched[0] == made.launched[1] == made.launched[2]


def test_a_pack_has_the_compiled_binaries(made):
    known, cache = pack.Pack.open(made.file, ARCH), binaries.BinaryFolder(made.folder)
    assert len(known) == 2 and known.get("0" * 32) is None
    for key in made.keys:
        compiled, packed = cache.get(key), known.get(key)
        cleared = compiled.cubin.index(b".version")  # of PTX, in the debug sections
        assert packed.cubin[cleared : cleared + 8] == bytes(8) and len(packed.cubin) == len(compiled.cubin)
        assert packed == compiled._replace(cubin=pack.without_debug(compiled.cubin))
        assert str(ROOT).encode() not in packed.cubin


# ---- What a binary is known by ------------------------------------------------------------------------------------


def test_a_key_is_the_same_in_every_process(made, other):
    assert made.many_keys == other["many_keys"]
    keys = list(made.many_keys.values())
    assert len(set(keys)) > 0.9 * len(keys) > 200  # the rest are equal


def test_a_key_is_the_same_with_every_triton_and_platform(monkeypatch):
    monkeypatch.setattr(binaries, "source_hash", lambda: "0" * 32)
    x = torch.zeros(64, 32, dtype=torch.float16)
    given = {"q_ptr": x, "stride_q": 32, "stride_k": 1, "n": 7, "s": 0.5, "none": None}
    assert launch_key(make_launch(**given, aligned=("n",))) == "dd2e6e912a05d63bbcd0976fcc061152"
    if has_gluon():
        from triton.experimental.gluon import language as gl

        box = shared_box(torch.bfloat16, (1, 64), gl.NVMMASharedLayout.get_default_for([1, 64], gl.float16))
        launch = make_launch(rows=Tiles(x, x.shape, x.stride(), box), options={"num_warps": 4, "ptx_version": 88})
        assert launch_key(launch) == "8c741b7d520c6509469a5446d2a0c969"
        assert launch_key(launch._replace(options={"num_warps": 4})) == launch_key(launch)


def test_keys_have_everything_a_kernel_is_compiled_for(monkeypatch):
    """Of stored binaries and of loaded ones. And nothing else: lengths, other strides and other addresses find them."""
    monkeypatch.setattr(binaries, "source_hash", lambda: "0" * 32)
    monkeypatch.setattr(binaries, "stored_binary", lambda *arguments: SimpleNamespace(shared=0))
    monkeypatch.setattr(launcher, "Binary", lambda *arguments: object())
    monkeypatch.setattr(launcher, "_binaries", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    x = torch.zeros(64, 32, dtype=torch.float16)

    def tiles(block):
        return Tiles(x, x.shape, x.stride(), shared_box(x.dtype, block))

    given = {"q_ptr": x, "stride_q": 16, "n": 3, "s": 0.5, "rows": tiles((16, 32)), "other_ptr": None}
    first = make_launch(**given)

    def keys(arch=ARCH, device=0, **changes):
        fields = {name: changes.pop(name) for name in list(changes) if name in Launch._fields}
        launch = first._replace(arguments={**given, **changes}, **fields)
        signature = launch_signature(launch)
        return binaries.binary_key(arch, launch, signature), launcher.loaded_binary(launch, signature, device)

    known = keys()
    for same in ({"q_ptr": x[8:]}, {"stride_q": 32}, {"n": 4}, {"s": 1.5}, {"rows": tiles((16, 32))}, {"grid": 7}):
        assert keys(**same) == known, same
    others = [
        {"q_ptr": x[0, 1:]}, {"q_ptr": x.bfloat16()}, {"q_ptr": None}, {"stride_q": 8}, {"stride_q": 1},
        {"stride_q": 2**32}, {"n": 2**40}, {"n": None}, {"rows": tiles((8, 32))}, {"other_ptr": x}, {"options": {}},
        {"aligned": ("n",)}, {"kernel": make_launch("g_kernel", **given).kernel},
        {"constants": {"c": Chosen(32, "causal", True, 0.5)}}, {"constants": {"c": Chosen(64, "causal", True, 1)}},
    ]  # fmt: skip
    for found in zip(known, *[keys(**other) for other in others], strict=True):
        assert len(set(found)) == len(others) + 1
    assert keys(device=1)[1] is not known[1] and keys(arch="sm_80")[0] != known[0]
    monkeypatch.setattr(binaries, "source_hash", lambda: "other")
    assert keys()[0] != known[0]


def sources(monkeypatch, tmp_path, text: bytes) -> Path:
    path = tmp_path / "kernel.py"
    path.write_bytes(text)
    monkeypatch.setattr(binaries, "_sources", lambda: {"kernel.py": path})
    binaries.source_hash.cache_clear()
    return path


@pytest.fixture
def own_sources(monkeypatch, tmp_path):
    yield lambda text: sources(monkeypatch, tmp_path, text)
    binaries.source_hash.cache_clear()


def test_ends_of_lines_are_no_other_sources(own_sources):
    hashes = []
    for text in (b"a = 1\nb = 2\n", b"a = 1\r\nb = 2\r\n", b"a = 1\nb = 3\n"):
        own_sources(text)
        hashes.append(binaries.source_hash())
    assert hashes[0] == hashes[1] != hashes[2]


def test_sources_with_an_old_date_that_changed_after_the_start_are_noticed(own_sources):
    """As `cp --preserve` and package managers leave them."""
    os.utime(own_sources(b"a = 1\n"), (0, 0))
    assert binaries.why_unknown() == "diyfa's files were changed after this process began"


def test_keys_of_foreign_kernels_have_their_sources(monkeypatch):
    launch = make_launch(n=3)
    launch.kernel.fn.__module__, launch.kernel.cache_key = "another.package", "one"
    keys = [launch_key(launch)]
    monkeypatch.setattr(launch.kernel, "cache_key", "another")
    assert launch_key(launch) not in keys


# ---- Packs that are refused ---------------------------------------------------------------------------------------


@pytest.fixture
def write(tmp_path, monkeypatch, binary):
    """Install a pack, changed by a function of its bytes, where Python finds it -> its file."""
    monkeypatch.setattr(pack, "without_debug", lambda cubin: cubin)  # those are no cubins
    monkeypatch.syspath_prepend(tmp_path)

    def write(change=lambda content: content):
        file = tmp_path / "diyfa_sm90" / pack.FILE_NAME
        file.parent.mkdir(exist_ok=True)
        pack.write_pack(file, ARCH, {"a": binary, "b": binary._replace(cubin=binary.cubin[::-1])})
        file.write_bytes(change(file.read_bytes()))
        return file

    return write


def test_an_installed_pack_is_found(write, binary, caplog):
    assert pack.installed(ARCH).reason == "no pack for sm_90 is installed"
    pack.installed.cache_clear()
    file = write()
    known = pack.installed(ARCH).pack
    assert known.path == file and known.get("a") == binary and binaries.find_binary(ARCH, "a") == binary
    assert pack.installed("sm_80").pack is None and not caplog.records
    assert backend.binaries(ARCH).startswith(f"2 kernels in {file}; cache folder ")


def test_a_flipped_bit_is_never_used(write, binary, caplog):
    file = write()
    content, right = file.read_bytes(), {"a": binary, "b": binary._replace(cubin=binary.cubin[::-1])}
    refused = missed = 0
    for place in (*range(32), *range(32, len(content), 7)):
        file.write_bytes(content[:place] + bytes([content[place] ^ (1 << place % 8)]) + content[place + 1 :])
        try:
            known = pack.Pack.open(file, ARCH)
        except pack.PackError as error:
            refused += 1
            assert str(error).split(":")[0] in (
                "it is no pack", "its format is 0, and this diyfa reads 1", "its index is damaged"
            ) or "its format is" in str(error), error  # fmt: skip
            continue
        found = {key: known.get(key) for key in right}
        missing = [key for key, x in found.items() if x is None]
        assert len(missing) == 1 and all(found[key] in (None, right[key]) for key in right)
        missed += 1
    assert refused > 32 and missed > 20
    assert [record.message for record in caplog.records] == [
        f"diyfa does not use {file}: a kernel in it is damaged: install it again"
    ]


@pytest.mark.parametrize("kept", [0, 10, 40, -1000, -1])
def test_a_truncated_pack_is_refused(write, kept, caplog):
    file = write(lambda content: content[:kept])
    known = pack.installed(ARCH).pack
    assert known is None or known.get("b") is None
    pack.installed.cache_clear()
    assert pack.installed(ARCH).pack is None or kept < 0
    (line,) = caplog.records
    assert line.message.startswith(f"diyfa does not use {file}: ") and line.levelno == logging.WARNING


def test_a_damaged_size_allocates_no_memory(write, monkeypatch):
    """Of the index: 4 GB, of which the file has none."""
    write(lambda content: content[:12] + b"\xff" * 4 + content[16:])
    asked = []

    class Watched(io.BufferedReader):
        def read(self, size=-1):
            asked.append(size)
            return super().read(size)

    monkeypatch.setattr(Path, "open", lambda path, mode: Watched(io.FileIO(path)))
    assert "its index is damaged" in pack.installed(ARCH).reason
    assert asked == [pack._HEADER.size]


def test_a_pack_of_other_sources_or_another_gpu_is_refused(write, monkeypatch):
    file = write()
    with pytest.raises(pack.PackError, match="it is for sm_90, not for sm_80"):
        pack.Pack.open(file, "sm_80")
    monkeypatch.setattr(pack, "source_hash", lambda: "other")
    assert "made from other sources than this diyfa" in pack.installed(ARCH).reason


def test_a_pack_that_cannot_be_read_is_refused(write, monkeypatch):
    file = write()
    known = pack.installed(ARCH).pack
    file.unlink()
    assert known.get("a") is None
    pack.installed.cache_clear()
    assert "it cannot be read: No such file" in pack.installed(ARCH).reason
    pack.installed.cache_clear()
    write()
    monkeypatch.setitem(sys.modules, "lzma", None)
    assert "this Python has no lzma" in pack.installed(ARCH).reason


# ---- The cache folder ---------------------------------------------------------------------------------------------


def test_a_broken_file_is_replaced(tmp_path, binary):
    folder = binaries.BinaryFolder(tmp_path / "new" / "folder")
    assert folder.get("a") is None and folder.put("a", binary) and folder.get("a") == binary
    file = folder.path / "a"
    content = file.read_bytes()
    for broken in (b"", content[:10], content[:-1], content[:-1] + b"x", b"x" + content[1:]):
        file.write_bytes(broken)
        assert folder.get("a") is None
    (folder.path / "b").write_bytes(content)  # of another kernel
    assert folder.get("b") is None
    assert folder.put("a", binary) and folder.get("a") == binary
    assert sorted(x.name for x in folder.path.iterdir()) == ["a", "b"]


def test_two_processes_write_the_same_files(other):
    assert other["read"] > 20 and other["read_here"] > 20 and other["files"] == [str(i) for i in range(8)]


def refusing(number):
    def refuse(*arguments, **options):
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES])
@pytest.mark.parametrize("name", ["mkdir", "write_bytes", "replace"])
def test_without_a_cache_folder_nothing_is_stored(tmp_path, monkeypatch, binary, name, number):
    folder = binaries.BinaryFolder(tmp_path / "cache")
    assert folder.put("a", binary)
    with monkeypatch.context() as patch:
        patch.setattr(*((os, name) if name == "replace" else (Path, name)), refusing(number))
        assert not folder.put("b", binary) and folder.get("a") == binary
    assert [x.name for x in folder.path.iterdir()] == ["a"]


def test_a_disk_that_fills_up_leaves_no_half_of_a_file(tmp_path, monkeypatch, binary):
    def write(path, content):
        with path.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = binaries.BinaryFolder(tmp_path)
    monkeypatch.setattr(Path, "write_bytes", write)
    assert not folder.put("a", binary) and not list(tmp_path.iterdir())


# ---- The compiler -------------------------------------------------------------------------------------------------


@pytest.fixture
def compiler(monkeypatch, binary):
    """Counts what is compiled, and takes `seconds` for it."""
    found = SimpleNamespace(names=[], seconds=0.0)

    def compile_binary(arch, launch, signature):
        time.sleep(found.seconds)
        found.names.append(launch.kernel.fn.__name__)
        return binary

    monkeypatch.setattr(jit, "compile_binary", compile_binary)
    return found


def stored(launch):
    return binaries.stored_binary(ARCH, launch, launch_signature(launch))


def test_compiled_binaries_are_stored(compiler, binary):
    launch = make_launch(n=3)
    assert [stored(launch) for _ in range(3)] == [binary] * 3 and compiler.names == ["f_kernel"]
    cache = binaries.cache_folder()
    assert cache.get(launch_key(launch)) == binary
    assert cache.path.parts[-2:] == ("binaries", f"triton-{binaries.triton.__version__}")


def test_a_pack_precedes_the_cache_folder(compiler, write, binary, monkeypatch):
    monkeypatch.setattr(binaries, "binary_key", lambda *arguments: "b")
    binaries.cache_folder().put("b", binary._replace(name="of the folder"))
    assert stored(make_launch(n=3)).name == "of the folder"
    write()
    pack.installed.cache_clear()
    assert stored(make_launch(n=3)).name == "f" and not compiler.names


@pytest.mark.parametrize("reason", ["home", "file", "changed", "asked for", "DISABLE_PTXAS_OPT", "PTXAS_OPTIONS"])
def test_a_call_runs_if_its_binary_cannot_be_stored(compiler, binary, monkeypatch, tmp_path, request, reason):
    if reason == "home":
        request.getfixturevalue("no_home")
        assert binaries.cache_folder() is None and "no cache folder" in backend.binaries(ARCH)
    elif reason == "file":
        (tmp_path / "cache").write_text("a file where the folder would be")
    elif reason == "changed":
        monkeypatch.setattr(binaries, "LOADED_AT", 0.0)
    elif reason.isupper():
        monkeypatch.setenv(reason, "1")
        assert binaries.why_unknown() == f"{reason} is set"
    else:
        monkeypatch.setattr(binaries.triton.knobs.compilation, "always_compile", True)
    assert [stored(make_launch(n=3)) for _ in range(2)] == [binary] * 2 and len(compiler.names) == 2
    assert not (tmp_path / "cache").is_dir()


def test_tritons_default_options_are_known(monkeypatch):
    assert binaries.why_unknown() is None
    monkeypatch.setenv("TRITON_DEBUG", "0")
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "off")
    assert binaries.why_unknown() is None


def test_a_pack_that_the_driver_cannot_load_is_rejected(compiler, write, binary, monkeypatch, caplog):
    """It may be older than the compiler that made it. Kernels are compiled, and found in the folder."""

    class Loaded:
        def __init__(self, stored, kinds):
            if stored.name != "compiled here":
                raise driver.BinaryRefused("device kernel image is invalid (200)")

    def compile_binary(arch, launch, signature):
        compiler.names.append(launch.kernel.fn.__name__)
        return binary._replace(name="compiled here")

    monkeypatch.setattr(jit, "compile_binary", compile_binary)
    monkeypatch.setattr(binaries, "binary_key", lambda *arguments: "b")
    monkeypatch.setattr(launcher, "Binary", Loaded)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    file, launch = write(), make_launch(n=3)
    for _ in range(2):
        monkeypatch.setattr(launcher, "_binaries", {})
        assert isinstance(launcher.loaded_binary(launch, launch_signature(launch), 0), Loaded)
    assert compiler.names == ["f_kernel"]
    (record,) = caplog.records
    assert record.message.startswith(f"diyfa does not use {file}: this driver cannot load its kernels")
    assert "this driver cannot load its kernels" in backend.binaries(ARCH)
    binaries.cache_folder().put("b", binary)
    monkeypatch.setattr(launcher, "_binaries", {})
    with pytest.raises(RuntimeError, match="device kernel image is invalid"):  # there is no pack to leave out
        launcher.loaded_binary(launch, launch_signature(launch), 0)


@pytest.mark.parametrize("result, is_refusal", [(200, True), (209, True), (2, False), (700, False)])
def test_only_some_errors_of_the_driver_are_about_a_binary(result, is_refusal):
    library = SimpleNamespace(cuGetErrorString=lambda *arguments: 0)
    with pytest.raises(RuntimeError) as raised:
        driver.Driver.check(SimpleNamespace(_library=library), result)
    assert isinstance(raised.value, driver.BinaryRefused) == is_refusal


def test_nothing_is_compiled_if_jit_is_off(compiler, monkeypatch):
    monkeypatch.setenv("DIYFA_JIT", "never")
    with pytest.raises(RuntimeError, match=r"DIYFA_JIT=never.*f_kernel.*no pack for sm_90.*DIYFA_JIT=auto"):
        stored(make_launch(n=3))
    assert not tune._may_measure()
    monkeypatch.setenv("DIYFA_JIT", "always")
    with pytest.raises(ValueError, match="DIYFA_JIT must be one of auto, never, got 'always'"):
        stored(make_launch(n=3))
    assert not compiler.names
    monkeypatch.setenv("DIYFA_JIT", "")
    assert stored(make_launch(n=3)) and compiler.names


def test_nothing_is_compiled_for_a_profiler_if_jit_is_off(monkeypatch):
    """It hooks Triton's own launches, which would compile."""
    monkeypatch.setattr(launcher.knobs.runtime, "launch_enter_hook", lambda metadata: None)
    monkeypatch.setenv("DIYFA_JIT", "never")
    with pytest.raises(RuntimeError, match=r"DIYFA_JIT=never, and Triton, whose launches a profiler hooks.*f_kernel"):
        launcher.launch_kernel(make_launch(n=3))


def test_without_a_compiler_a_pass_is_launched_completely_or_not_at_all(monkeypatch):
    def loaded_binary(launch, signature, device, stored=None):
        if launch.arguments["n"] == 2:
            raise RuntimeError("not this one")

    launched = []
    monkeypatch.setattr(launcher, "loaded_binary", loaded_binary)
    monkeypatch.setattr(launcher, "current_device", lambda: 0)
    monkeypatch.setattr(passes, "launch_kernel", lambda launch: launched.append(launch.arguments["n"]))
    monkeypatch.setenv("DIYFA_JIT", "never")
    passes.launch_each([make_launch(n=0), make_launch(n=1)])
    with pytest.raises(RuntimeError, match="not this one"):
        passes.launch_each([make_launch(n=1), make_launch(n=2)])
    assert launched == [0, 1]


def test_missing_kernels_of_a_pass_are_compiled_side_by_side(compiler, monkeypatch, binary):
    """Each compilation waits until both have begun. Then they are loaded in the calling thread, and launched."""
    both_have_begun, threads, launched = threading.Barrier(2), [], []

    def compile_binary(arch, launch, signature):
        both_have_begun.wait(20)
        return binary._replace(name=launch.kernel.fn.__name__)

    def loaded(stored, kinds):
        threads.append(threading.current_thread())
        return stored.name

    monkeypatch.setattr(jit, "compile_binary", compile_binary)
    monkeypatch.setattr(launcher, "Binary", loaded)
    monkeypatch.setattr(launcher, "_binaries", {})
    monkeypatch.setattr(launcher, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(passes, "launch_kernel", lambda launch: launched.append(launch.kernel.fn.__name__))
    pair = [make_launch("f_kernel", n=3), make_launch("g_kernel", n=3)]
    passes.launch_each([pair[0], *pair])  # an equal one is compiled once
    assert sorted(launcher._binaries.values()) == ["f_kernel", "g_kernel"]
    assert threads == [threading.current_thread()] * 2 and launched == ["f_kernel", "f_kernel", "g_kernel"]


def test_a_long_compilation_says_so_once(compiler, monkeypatch, capsys):
    monkeypatch.setattr(jit, "MESSAGE_AFTER", 0.05)
    stored(make_launch(n=3))
    assert capsys.readouterr().err == ""
    compiler.seconds = 0.3
    for name in ("g_kernel", "h_kernel"):
        stored(make_launch(name, n=3))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("diyfa is compiling g_kernel for sm_90") and "no pack for sm_90 is installed" in line
    assert "Later processes find it there" in line and "`diyfa warmup`" in line
