"""Which tile a call gets: one that is asked for, one that was tuned, the table's, or the conservative one where the
compiler does not take that. Kernels run in the interpreter; refusals of the compiler are planted."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from eight_bit_cases import Case as EightBitCase
from eight_bit_cases import check as check_eight_bits
from targets import Target

import diyfa
from diyfa.backends.npu.runtime import tune
from diyfa.backends.npu.tables import configs, requested
from diyfa.eight_bits import BLOCK_K, BLOCK_Q
from diyfa.lab.npu import specs
from diyfa.problem import AttentionTensors, KVCacheProblem, Launch
from diyfa.reference import reference_kvcache
from diyfa.testing import AttentionCase, assert_within_budget, attention_function, make_inputs, run_case

A2 = "Ascend910B3"
CASE = AttentionCase("small", seqlen_q=70, seqlen_k=90, head_dim=16, causal=True)
OVERFLOW = "loc(...): error: ub overflow, requires 2400000 bits while 1572864 bits avaliable"


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch, npu: torch.device):
    """The module under test, with nothing remembered."""
    module = importlib.import_module("diyfa.backends.npu.runtime.tiles")
    monkeypatch.setattr(module, "_refused", {})
    monkeypatch.delenv(requested.VARIABLE, raising=False)
    monkeypatch.setattr(module.compiler, "compiler_version", lambda: "0.1.0 (e4e2ba9841d1 2026-01-16)")
    return module


def tile_shape(launch: Launch) -> tuple[int, int]:
    """Query rows and keys of its tile."""
    constants = launch.constants["c"]
    if hasattr(constants, "queries"):  # of a kernel of caches; those for vector cores have no keys
        return constants.heads * constants.queries, getattr(constants, "block_n", 0)
    return constants.block_m, constants.block_n


@pytest.mark.parametrize("kernel", ["fwd", "dkdv", "dq", "dbias"])
@pytest.mark.parametrize("arch", [A2, "Ascend950PR_9589"])
def test_every_tile_divides_the_blocks_of_a_mask(arch: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table's tile, those to tune and the conservative one. One that is asked for and does not is an error."""
    monkeypatch.delenv(requested.VARIABLE, raising=False)
    features = [{}, {"softcap": 30.0, "alibi": True}, {"dropout": True}, {"bias": "qk", "softcap": 30.0}]
    for dtype, head_dim in product(("float16", "float32"), configs.HEAD_DIM_CLASSES):
        for mask, more in product(product((64, 128), repeat=2), features):
            problem, _ = specs.example_case(arch, {"dtype": dtype, "head_dim": head_dim, "mask": mask, **more})
            for tile in (configs.table_tile(problem, kernel), *configs.candidates(problem, kernel)):
                assert mask[0] % tile.block_m == 0 and mask[1] % tile.block_n == 0, (mask, tile)
    problem = specs.example(arch, mask=(64, 128))
    monkeypatch.setenv(requested.VARIABLE, "64x128")
    asked = configs.requested_tile(problem, kernel)
    assert asked is not None and (asked.block_m, asked.block_n) == (64, 128)
    for wrong in ("128x64", "48x64", "64x256"):
        monkeypatch.setenv(requested.VARIABLE, wrong)
        with pytest.raises(ValueError, match="does not divide the blocks of the mask, 64 queries and 128 keys"):
            configs.requested_tile(problem, kernel)


@pytest.mark.parametrize("arch", [A2, "Ascend950PR_9589"])
def test_every_tile_of_int8_has_whole_blocks(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and keys that share a descale. One that is asked for and has them not is an error."""
    monkeypatch.delenv(requested.VARIABLE, raising=False)
    int8 = {"dtype": "int8", "value_dtype": "bfloat16", "out_dtype": "bfloat16"}
    for head_dim, case in product(configs.HEAD_DIM_CLASSES, specs.MODE_CASES.values()):
        problem, _ = specs.example_case(arch, {**case, **int8, "head_dim": head_dim})
        for tile in (configs.table_tile(problem, "fwd"), *configs.candidates(problem)):
            assert BLOCK_Q % tile.block_m == 0, tile
            assert tile.block_n == 32 or tile.block_n % BLOCK_K == 0, tile
    for shape in ("16x32", "128x192"):
        monkeypatch.setenv(requested.VARIABLE, shape)
        assert configs.requested_tile(problem, "fwd") is not None
    for wrong in ("64x16", "48x64", "64x96"):
        monkeypatch.setenv(requested.VARIABLE, wrong)
        with pytest.raises(ValueError, match="its rows must divide 128, and its keys must be 32 or a multiple of 64"):
            configs.requested_tile(problem, "fwd")


class Compiler:
    """Runs launches of tiles that it takes, and raises what triton-ascend raises for others."""

    def __init__(self, run: Callable[[Launch], None], takes: Callable[[str, str], bool]) -> None:
        self.run, self.takes = run, takes
        self.tried: list[tuple[str, str]] = []  # kernel, tile

    def __call__(self, launch: Launch) -> None:
        from triton.compiler.errors import MLIRCompilationError

        kernel = launch.kernel.__name__.removeprefix("_").removesuffix("_kernel").removeprefix("bwd_")
        tile = "{}x{}".format(*tile_shape(launch))
        self.tried.append((kernel, tile))
        if not self.takes(kernel, tile):
            raise MLIRCompilationError("ConvertLinalgRToBinary", OVERFLOW)
        self.run(launch)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tiles) -> Callable[..., Compiler]:
    """Installs a compiler that takes what it is told to."""

    def install(takes: Callable[[str, str], bool]) -> Compiler:
        planted = Compiler(tiles.run, takes)
        monkeypatch.setattr(tiles, "run", planted)
        return planted

    return install


def forward_launch(q: torch.Tensor, **changes) -> Launch:
    """The launch of a plain call with the tile 64x64 but for `changes`."""
    from diyfa.backends.npu.attention.fwd import make_launch

    problem = specs.example(A2, head_dim=16, dtype=str(q.dtype).removeprefix("torch."))
    tensors = AttentionTensors(q, q, q, 1.0)
    return make_launch(problem, tensors, q, q.new_empty(q.shape[:3]), configs.AttentionTile(64, 64, **changes))


def run(case: AttentionCase, npu: torch.device) -> None:
    """Forward and gradients, against the reference."""
    assert_within_budget(run_case(attention_function(case), make_inputs(case, npu)), case)


# --- DIYFA_NPU_TILE ---------------------------------------------------------------------------------------------------


def test_tiles_by_name() -> None:
    every = requested.parse("64x128")
    assert set(every) == set(requested.KERNELS) and set(every.values()) == {(64, 128, None)}
    assert requested.parse("fwd=64x128x2, dq=32x16") == {"fwd": (64, 128, 2), "dq": (32, 16, None)}


@pytest.mark.parametrize(("text", "reason"), [
    ("64", "'64' is no tile"),
    ("64x", "'64x' is no tile"),
    ("64x128x2x2", "is no tile"),
    ("-64x64", "is no tile"),
    ("fwd=", "'' is no tile"),
    ("fwd=64x64,", "'' is no tile"),
    ("forward=64x64", "there is no kernel 'forward', but fwd, dq, dkdv, dbias"),
    ("64x100", "100 keys: the cube unit takes multiples of 16"),
    ("0x64", "0 rows"),
    ("2048x64", "at most 1024"),
    ("64x64x0", "0 workspace buffers"),
    ("fwd=64x64,fwd=32x32", "fwd is named twice"),
    ("64x64,dq=32x32", "dq is named twice"),
])  # fmt: skip
def test_what_names_no_tile(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match="DIYFA_NPU_TILE") as caught:
        requested.parse(text)
    assert reason in str(caught.value) and "fwd=64x128,dq=64x64" in str(caught.value)


def test_a_wrong_name_is_refused_before_any_launch(npu: torch.device, compiler, monkeypatch) -> None:
    planted = compiler(lambda kernel, tile: True)
    monkeypatch.setenv(requested.VARIABLE, "64*64")
    with pytest.raises(ValueError, match="is no tile"):
        run(CASE, npu)
    assert planted.tried == []


def test_an_asked_tile_is_launched_and_explained(npu: torch.device, compiler, monkeypatch) -> None:
    planted = compiler(lambda kernel, tile: True)
    monkeypatch.setenv(requested.VARIABLE, "fwd=32x48,dkdv=16x32")
    run(CASE, npu)
    table = configs.attention_tile(specs.example(A2, head_dim=16, window_right=0), "dq")
    assert planted.tried == [("fwd", "32x48"), ("dkdv", "16x32"), ("dq", f"{table.block_m}x{table.block_n}")]
    q = torch.empty(1, 2, 32, 16, dtype=torch.float16, device=npu)
    assert "block_m=32, block_n=48" in str(diyfa.explain(q, q, q))


def test_keys_that_fill_the_table_s_tile_but_not_the_asked_one(npu: torch.device, tiles, monkeypatch) -> None:
    """There the table's kernel has no mask; one with 48 keys needs it for the last tile."""
    case = AttentionCase("even", seqlen_q=20, seqlen_k=512, heads=1, head_dim=16)
    problem = specs.example(A2, head_dim=16, seqlen_k=512)
    assert configs.attention_key(problem, "fwd").mode == "even"
    monkeypatch.setenv(requested.VARIABLE, "16x48")
    run(case, npu)


@pytest.mark.parametrize("seqlen_k", [47, 49, 95])
def test_keys_that_nearly_fill_their_tiles(npu: torch.device, tiles, monkeypatch, seqlen_k: int) -> None:
    """One more or less: whether the last tile needs a mask is a comparison without room for an error."""
    monkeypatch.setenv(requested.VARIABLE, "16x48")
    run(AttentionCase("nearly", seqlen_q=20, seqlen_k=seqlen_k, heads=1, head_dim=16), npu)


def test_an_asked_tile_that_does_not_compile_is_not_replaced(npu: torch.device, compiler, monkeypatch) -> None:
    planted = compiler(lambda kernel, tile: False)
    monkeypatch.setenv(requested.VARIABLE, "96x96")
    with pytest.raises(RuntimeError, match=r"the tile 96x96 of attention fwd .*ub overflow: needs 292 KiB of 192") as e:
        run(CASE, npu)
    assert "DIYFA_NPU_TILE asks for this tile" in str(e.value) and planted.tried == [("fwd", "96x96")]


# --- the conservative tile --------------------------------------------------------------------------------------------


def test_the_conservative_tile_takes_the_place_of_one_that_does_not_compile(npu: torch.device, compiler) -> None:
    """Once warned of for each kernel, then without a word; equal calls then use the same tile at once."""
    planted = compiler(lambda kernel, tile: kernel == "dkdv" or tile == "64x64")
    with pytest.warns(RuntimeWarning) as caught:
        run(CASE, npu)
    told = [str(w.message) for w in caught if "conservative" in str(w.message)]
    assert len(told) == 2
    for text, kernel in zip(told, ("fwd", "dq"), strict=True):
        assert f"attention {kernel} (float16, D = 16, causal) does not compile" in text
        for part in ("0.1.0 (e4e2ba9841d1 2026-01-16)", "needs 292 KiB of 192", "64x64", "diyfa tune --head-dim 16"):
            assert part in text
        assert f"DIYFA_NPU_TILE={kernel}=64x64" in text
    assert [kernel for kernel, _ in planted.tried] == ["fwd", "fwd", "dkdv", "dq", "dq"]
    planted.tried.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        run(CASE, npu)
    assert [tile for kernel, tile in planted.tried if kernel != "dkdv"] == ["64x64"] * 2 and len(planted.tried) == 3


def test_the_conservative_tile_of_int8(npu: torch.device, compiler) -> None:
    """`diyfa tune` makes no int8 calls, so the warning does not name it."""
    case = EightBitCase(
        dtype=torch.int8, value_dtype=torch.bfloat16, kind="block", means=True, seqlen_k=150, head_dim=16,
        options={"softcap": 8.0, "causal": True},
    )  # fmt: skip
    planted = compiler(lambda kernel, tile: tile == "32x32")
    with pytest.warns(RuntimeWarning, match="conservative tile 32x32") as told:
        check_eight_bits(case, Target("npu", npu.type, True))
    assert [tile for _, tile in planted.tried] == ["64x128", "32x32"]
    assert not any("diyfa tune" in str(each.message) for each in told)


def test_another_variant_of_the_kernel_keeps_its_tile(npu: torch.device, compiler) -> None:
    """What was refused is a compiled kernel; which tile another call gets does not depend on what came before."""
    refused = []

    def takes(kernel: str, tile: str) -> bool:
        if not refused:
            refused.append(tile)
            return False
        return True

    planted = compiler(takes)
    with pytest.warns(RuntimeWarning, match="conservative"):
        run(CASE, npu)
    planted.tried.clear()
    run(AttentionCase("other", seqlen_q=20, seqlen_k=30, head_dim=16, causal=True, softcap=5.0), npu)
    assert ("fwd", "64x64") not in planted.tried


@pytest.mark.parametrize(
    "change", [{"dtype": "bfloat16"}, {"workspace_buffers": 2}], ids=lambda change: next(iter(change))
)
def test_another_type_or_option_is_another_variant(npu: torch.device, tiles, change) -> None:
    """Of one shape and with equal constants, but compiled apart."""
    variants = set()
    for changed in ({}, change):
        dtype = getattr(torch, changed.get("dtype", "float16"))
        q = torch.empty(1, 1, 20, 16, dtype=dtype, device=npu)
        launch = forward_launch(q, **{name: x for name, x in changed.items() if name != "dtype"})
        variants.add(tiles.variant(launch))
    assert len(variants) == 2


def test_both_reasons_where_nothing_compiles(npu: torch.device, compiler, monkeypatch, tiles) -> None:
    planted = compiler(lambda kernel, tile: False)
    monkeypatch.setattr(tiles.compiler, "compiler_version", lambda: "")
    for _ in range(2):  # nothing is remembered that did not work
        planted.tried.clear()
        with pytest.raises(RuntimeError, match="conservative tile does not compile either: the tile 64x64") as caught:
            run(CASE, npu)
        assert len(planted.tried) == 2 and str(caught.value).count("ub overflow") == 2
        assert "set_env.sh" in str(caught.value)


def test_what_says_that_a_kernel_does_not_compile(tiles) -> None:
    from triton.compiler.errors import CompilationError, MLIRCompilationError
    from triton.runtime.errors import OutOfResources

    refusals = [
        MLIRCompilationError("ConvertLinalgRToBinary", OVERFLOW), CompilationError("", None, "no such operation"),
        OutOfResources(2, 1, "shared memory"), RuntimeError("already failed once"),
    ]  # fmt: skip
    assert all(tiles.compiler.is_compile_failure(refusal) for refusal in refusals)
    assert not tiles.compiler.is_compile_failure(RuntimeError("it already failed once on the device"))


def test_what_goes_wrong_on_the_device_is_raised(npu: torch.device, compiler, tiles, monkeypatch) -> None:
    launched = []

    def crash(launch: Launch) -> None:
        launched.append(launch)
        raise RuntimeError("The device execution failed: aicore exception, error code 507015")

    monkeypatch.setattr(tiles, "run", crash)
    with pytest.raises(RuntimeError, match="aicore exception"):
        run(CASE, npu)
    assert len(launched) == 1 and not tiles._refused


def test_what_is_remembered_is_bounded(npu: torch.device, compiler, tiles, monkeypatch) -> None:
    monkeypatch.setattr(tiles, "MAX_REFUSED", 2)
    compiler(lambda kernel, tile: kernel != "fwd" or tile == "64x64")
    with pytest.warns(RuntimeWarning):
        for head_dim in (16, 24, 32, 40):
            q = torch.empty(1, 1, 20, head_dim, dtype=torch.float16, device=npu)
            diyfa.flash_attention(q, q, q)
    assert len(tiles._refused) == 2


# --- over a cache -----------------------------------------------------------------------------------------------------


def decode(npu: torch.device, page_size: int = 64, seqlen_q: int = 2, heads: int = 16) -> None:
    """A call over a cache, against the reference."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, seqlen_q, heads, 16, generator=generator).half()
    cache = torch.randn(2, 6, page_size, 1, 16, generator=generator).half()
    table, lengths = torch.tensor([[4, 0, 2], [1, 5, 3]]).int(), torch.tensor([2 * page_size + 3, page_size]).int()
    options = {"cache_seqlens": lengths, "block_table": table, "causal": True}
    want = reference_kvcache(q.float(), *cache.float(), **options)
    given = {name: x.to(npu) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    got = diyfa.flash_attn_with_kvcache(q.to(npu), *(x.to(npu) for x in cache), **given)
    torch.testing.assert_close(got.cpu().float(), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("refused", ["decode", "combine"])
def test_the_conservative_tile_over_a_cache(npu: torch.device, compiler, refused: str) -> None:
    """Of all kernels of the call, whichever was refused, with one warning."""
    planted = compiler(lambda kernel, tile: kernel != refused or tile.startswith("16x"))
    with pytest.warns(RuntimeWarning, match=r"the tile 32x64 of attention decode .*pages of 64.*--page-size 64"):
        decode(npu)
    planted.tried.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        decode(npu)
    assert [tile.split("x")[0] for _, tile in planted.tried] == ["16"] * 3


def test_no_other_tile_in_the_batch_invariant_mode(npu: torch.device, compiler, monkeypatch) -> None:
    planted = compiler(lambda kernel, tile: kernel != "decode" or tile == "16x32")
    with diyfa.batch_invariant():
        with pytest.raises(RuntimeError, match=r"all calls have one tile: DIYFA_NPU_TILE=decode=16x32"):
            decode(npu)
        monkeypatch.setenv(requested.VARIABLE, "decode=16x32")
        planted.tried.clear()
        for page_size in (64, 5):
            decode(npu, page_size)
        assert {tile for kernel, tile in planted.tried if kernel == "decode"} == {"16x32"}


def test_what_was_refused_elsewhere_is_not_replaced_silently(npu: torch.device, compiler, monkeypatch) -> None:
    """Other calls fell back on the conservative tile; the mode, and a tile that is asked for, still raise."""
    planted = compiler(lambda kernel, tile: kernel != "decode" or tile == "16x32")
    with pytest.warns(RuntimeWarning, match=r"the tile 64x64 of attention decode .*conservative"):
        decode(npu, seqlen_q=4)
    with diyfa.batch_invariant(), pytest.raises(RuntimeError, match="all calls have one tile"):
        decode(npu, seqlen_q=4)
    monkeypatch.setenv(requested.VARIABLE, "decode=64x64")
    with pytest.raises(RuntimeError, match=r"the tile 64x64 of attention decode .*asks for this tile"):
        decode(npu, seqlen_q=4)
    assert planted.tried[-1] == ("decode", "64x64")


def test_an_asked_tile_over_a_cache(npu: torch.device, compiler, monkeypatch) -> None:
    """As far as there are rows, and keys in a page; rows are a power of two."""
    planted = compiler(lambda kernel, tile: True)
    for asks, page_size, heads, tile in (
        ("48x32", 64, 16, "32x32"), ("fwd=16x16,decode=128x128", 64, 3, "16x64"), ("16x16x2", 5, 16, "16x16"),
    ):  # fmt: skip
        monkeypatch.setenv(requested.VARIABLE, asks)
        planted.tried.clear()
        decode(npu, page_size, heads=heads)
        assert [tile for kernel, tile in planted.tried if kernel == "decode"] == [tile]
    planted = compiler(lambda kernel, tile: kernel != "decode")
    with pytest.raises(RuntimeError, match=r"the tile 16x16 of attention decode .*asks for this tile"):
        decode(npu, 5)


def every_key() -> Iterator[tuple[str, str, int, str]]:
    for key in configs.ATTENTION_TILES:
        yield key.kernel, {2: "float16", 4: "float32"}[key.width], key.head_dim, key.mode


def test_the_conservative_tile_of_each_row() -> None:
    """No larger than the table's, and it needs no mask where the table's needs none."""
    for kernel, dtype, head_dim, mode in every_key():
        for arch in (A2, "Ascend950PR_9589"):
            problem, _ = specs.example_case(
                arch, {**specs.mode_case(kernel, mode), "dtype": dtype, "head_dim": head_dim}
            )
            tile, even = configs.conservative_tile(problem, kernel), configs.candidates(problem, kernel)[0]
            assert configs.fits(tile, problem, kernel) and configs.candidates(problem, kernel)[-1] == tile
            assert (tile.workspace_buffers, tile.vector_loop, tile.cube_loop) == (2, None, None)  # the compiler's own
            if arch != A2 and dtype != "float32":
                assert tile.block_m >= 32, "bishengir-compile-a5 crashes on 16x16"
            if mode == "even":
                assert even.block_n % tile.block_n == 0 or kernel == "dkdv", (arch, kernel, dtype, head_dim)


# --- tuned tiles ------------------------------------------------------------------------------------------------------


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch, tmp_path, tiles):
    """The NPU's tuner with a device and a timer of its own: fewer scores take less time."""
    monkeypatch.setenv("DIYFA_CACHE_DIR", str(tmp_path))
    launched: list[Launch] = []
    plain = tiles.run

    def timer(call: Callable[[], None]) -> float:
        call()
        launch = next(x for x in reversed(launched) if "set_workspace_multibuffer" in x.options)
        rows, keys = tile_shape(launch)
        return rows * keys + launch.options["set_workspace_multibuffer"]

    def noted(launch: Launch) -> None:
        launched.append(launch)
        plain(launch)

    monkeypatch.setattr(tiles, "run", noted)
    tuner = tune.Tuner(timer, device=lambda: (0, "Ascend910B3"), rounds=1)
    monkeypatch.setattr(tiles, "tuner", tuner)
    tuner.launched = launched
    return tuner


def test_a_call_uses_what_was_tuned_and_measures_nothing_itself(npu: torch.device, tuner) -> None:
    case = AttentionCase("tuned", seqlen_q=20, seqlen_k=40, heads=1, head_dim=16)
    run(case, npu)
    assert len(tuner.launched) == 3 and tuner.stored() == []  # preprocess has no tile
    with tuner.measuring():
        run(case, npu)
    assert {tile.kernel for tile in tuner.stored()} == {"attention_fwd", "attention_dkdv", "attention_dq"}
    best = {tile.kernel.removeprefix("attention_"): tile.config for tile in tuner.stored()}
    tuner.launched.clear()
    run(case, npu)
    for launch, kernel in zip(tuner.launched, ("fwd", "dkdv", "dq"), strict=True):
        assert tile_shape(launch) == (best[kernel]["block_m"], best[kernel]["block_n"]), kernel
    assert tuner.clear() == 3


def test_calls_over_a_cache_are_tuned(npu: torch.device, tuner) -> None:
    with tuner.measuring():
        decode(npu)
        with diyfa.batch_invariant():
            decode(npu)
    (stored,) = tuner.stored()
    assert stored.kernel == "attention_decode"
    best = stored.config["block_m"], stored.config["block_n"]
    tuner.launched.clear()
    decode(npu)
    assert best != (32, 64) and best in [tile_shape(launch) for launch in tuner.launched]


def test_tuning_keeps_what_compiles(npu: torch.device, tuner, tiles, monkeypatch) -> None:
    """Where the table's tile does not, and without a word: it is not in use any more."""
    noted, conservative = tiles.run, (64, 64)

    def refusing(launch: Launch) -> None:
        if tile_shape(launch) != conservative:
            from triton.compiler.errors import MLIRCompilationError

            raise MLIRCompilationError("ConvertLinalgRToBinary", OVERFLOW)
        noted(launch)

    monkeypatch.setattr(tiles, "run", refusing)
    q = torch.zeros(1, 1, 20, 16, dtype=torch.float16, device=npu)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with tuner.measuring():
            diyfa.flash_attention(q, q, q)
        diyfa.flash_attention(q, q, q)
    (stored,) = tuner.stored()
    assert (stored.config["block_m"], stored.config["block_n"]) == conservative


PROBLEMS = {
    "attention": specs.example(A2, head_dim=16, seqlen_k=512),
    "cache": KVCacheProblem("npu", A2, "float16", "float16", "bshd", 4, 8, 8, 1, 1024, 64, 64, page_size=64),
}
OTHERS = {
    "attention": [{"dtype": "bfloat16"}, {"layout": "bshd"}, {"seqlen_k": 511}, {"head_dim": 24}, {"head_dim_v": 24},
        {"window_right": 0}, {"window_left": 60}, {"window_left": 600}, {"softcap": 5.0}, {"alibi": True},
        {"sinks": True}, {"dropout": True}, {"bias": "float16"}, {"bias": "float32"}, {"seq_lens": True}],
    "cache": [{"dtype": "bfloat16"}, {"layout": "thd"}, {"heads_kv": 4}, {"seqlen_q": 2}, {"capacity": 4096},
        {"head_dim": 72}, {"head_dim_v": 72}, {"page_size": 128}, {"packed_keys": True}, {"window_left": 60},
        {"window_right": 0}, {"softcap": 5.0}, {"alibi": True}, {"sinks": True}, {"num_splits": 2}],
}  # fmt: skip


@pytest.mark.parametrize("what", PROBLEMS)
def test_what_is_tuned_by_itself(tiles, what: str) -> None:
    """A tile that was measured for other problems need not even compile."""
    problem, kernel = PROBLEMS[what], {"attention": "fwd", "cache": "decode"}[what]
    buckets = [tiles._bucket(problem.replace(**change), kernel) for change in ({}, *OTHERS[what])]
    assert len(set(buckets)) == len(buckets), [x for x in buckets if buckets.count(x) > 1]


@pytest.mark.parametrize("change", [{"batch": 64}, {"seqlen_q": 16384}, {"seqlen_k": 16384}], ids=str)
def test_what_shares_a_tuned_tile(tiles, change: dict[str, int]) -> None:
    problem = specs.example(A2, head_dim=16, seqlen_q=8192, seqlen_k=8192)
    assert tiles._bucket(problem, "fwd") == tiles._bucket(problem.replace(**change), "fwd")


def test_a_deterministic_call_is_not_tuned(npu: torch.device, tuner) -> None:
    q = torch.zeros(1, 1, 20, 16, dtype=torch.float16, device=npu)
    with tuner.measuring():
        diyfa.flash_attention(q, q, q, deterministic=True)
    assert tuner.stored() == [] and len(tuner.launched) == 1


def test_an_asked_tile_comes_before_a_tuned_one(npu: torch.device, tuner, monkeypatch) -> None:
    q = torch.zeros(1, 1, 20, 16, dtype=torch.float16, device=npu)
    with tuner.measuring():
        diyfa.flash_attention(q, q, q)
    monkeypatch.setenv(requested.VARIABLE, "fwd=16x80")
    diyfa.flash_attention(q, q, q)
    assert tile_shape(tuner.launched[-1]) == (16, 80)
