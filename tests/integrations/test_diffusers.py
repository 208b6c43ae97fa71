"""Pipelines of diffusers by diyfa beside PyTorch's attention: a diffusion transformer, and a UNet; on the GPU where
there is one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from eager_budget import (
    DEVICE,
    assert_matches_reference,
    assert_within_budget_of,
    leaves,
    on_device,
    with_gradients,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

import diyfa
from diyfa.integrations import use_in_diffusers, use_in_pytorch
from diyfa.testing import rounding_unit

TOLERANCE = {"atol": 2e-5, "rtol": 2e-4}


@pytest.fixture(autouse=True)
def exact_convolutions() -> Iterator[None]:
    """Those around the attention: a GPU's otherwise make more of a difference in the last bit."""
    with torch.backends.cudnn.flags(allow_tf32=False, deterministic=True):
        yield


@pytest.fixture
def handle() -> Iterator[Any]:
    handle = use_in_diffusers()
    with diyfa.use_backend(DEVICE):
        yield handle
    handle.remove()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vae() -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(16, 16), down_block_types=("DownEncoderBlock2D",) * 2, layers_per_block=1,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, norm_num_groups=4,
        use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.0, scaling_factor=1.0,
    )  # fmt: skip


def flux() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, pooled_projection_dim=20, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    pipeline = diffusers.FluxPipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(), vae(), None, None, None, None, transformer
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(DEVICE)


def draw_by_flux(pipeline: Any) -> torch.Tensor:
    words = torch.randn(1, 7, 24, generator=seeded(1)).to(DEVICE)
    return pipeline(
        prompt_embeds=words, pooled_prompt_embeds=words[:, 0, :20], height=16, width=24, num_inference_steps=2,
        output_type="pt", generator=seeded(2),
    ).images  # fmt: skip


def denoised(transformer: Any) -> torch.Tensor:
    torch.manual_seed(3)
    with torch.device(DEVICE):
        return transformer(
            torch.randn(2, 12, 16), torch.randn(2, 7, 24), torch.randn(2, 20), torch.rand(2),
            torch.randint(0, 9, (12, 3)), torch.zeros(7, 3), return_dict=False,
        )[0]  # fmt: skip


@pytest.mark.parametrize("dtype", ["int8", "float8"])
def test_attention_in_eight_bits_is_asked_for(dtype: str) -> None:
    """And never a default: the handle and its counts say so, and other options than those of the handle are refused."""
    generator = seeded(3)
    q, k, v = (torch.randn(1, 40, 2, 16, generator=generator).to(DEVICE, torch.bfloat16) for _ in range(3))
    mask = torch.rand(1, 1, 40, 40, generator=generator).to(DEVICE) > 0.3
    handle = use_in_diffusers(quantize=dtype)
    try:
        with diyfa.use_backend(DEVICE):
            found = dispatch_attention_fn(q, k, v, attn_mask=mask, backend=AttentionBackendName("diyfa"))
            with pytest.raises(ValueError, match="no gradient"):
                dispatch_attention_fn(q.clone().requires_grad_(), k, v, backend=AttentionBackendName("diyfa"))
        assert use_in_diffusers(dtype) is handle
        with pytest.raises(ValueError, match="remove that handle first"):
            use_in_diffusers()
    finally:
        handle.remove()
    exact = dispatch_attention_fn(
        *(x.float() for x in (q, k, v)), attn_mask=mask, backend=AttentionBackendName("native")
    )
    error = (found.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert found.dtype == torch.bfloat16 and 1e-3 < error < (0.03 if dtype == "int8" else 0.1)
    assert next(iter(handle.calls)) == f"attention with a mask: diyfa in {dtype}"
    with pytest.raises(ValueError, match="quantize must be None or one of float8, int8"):
        use_in_diffusers("int4")


def test_a_diffusion_transformer(handle: Any) -> None:
    pipeline = flux()
    expected = draw_by_flux(pipeline)
    assert not handle.calls
    pipeline.transformer.set_attention_backend("diyfa")
    torch.testing.assert_close(draw_by_flux(pipeline), expected, **TOLERANCE)
    assert handle.calls == {"attention: diyfa": 4}


def test_training_a_diffusion_transformer(handle: Any) -> None:
    found = []
    for backend in ("native", "diyfa"):
        model = flux().transformer
        model.set_attention_backend(backend)
        denoised(model).square().sum().backward()
        found.append({name: x.grad for name, x in model.named_parameters()})
    native, ours = found
    largest = max(float(x.abs().max()) for x in native.values())
    for name, want in native.items():
        torch.testing.assert_close(ours[name] / largest, want / largest, **TOLERANCE)
    assert handle.calls == {"attention: diyfa": 2}


def unet() -> Any:
    torch.manual_seed(0)
    model = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(16, 32), layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=24, attention_head_dim=4,
    )  # fmt: skip
    pipeline = diffusers.StableDiffusionPipeline(
        vae(), None, None, model, diffusers.DDIMScheduler(), None, None, requires_safety_checker=False
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(DEVICE)


def draw_by_unet(pipeline: Any) -> torch.Tensor:
    words = torch.randn(1, 7, 24, generator=seeded(1)).to(DEVICE, pipeline.unet.dtype)
    return pipeline(
        prompt_embeds=words, negative_prompt_embeds=-words, num_inference_steps=2, output_type="pt", generator=seeded(2)
    ).images


@pytest.mark.skipif(DEVICE == "cuda", reason="there PyTorch takes flash attention for half precision only")
def test_a_unet() -> None:
    """It calls PyTorch's attention itself."""
    pipeline = unet()
    expected = draw_by_unet(pipeline)
    handle = use_in_pytorch("cpu")
    try:
        with diyfa.use_backend("cpu"):
            torch.testing.assert_close(draw_by_unet(pipeline), expected, **TOLERANCE)
        assert handle.calls["scaled_dot_product_attention: diyfa"] >= 12
    finally:
        handle.remove()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
def test_a_unet_in_half_precision() -> None:
    """As near to the images of float32 as PyTorch's own flash attention is."""
    expected = draw_by_unet(unet())
    pipeline = unet().to(torch.float16)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        native = draw_by_unet(pipeline)
        handle = use_in_pytorch("cuda")
        try:
            found = draw_by_unet(pipeline)
            assert handle.calls["_scaled_dot_product_flash_attention: diyfa"] >= 12
        finally:
            handle.remove()
    assert_within_budget_of(native, found, expected.double(), unit=rounding_unit(expected.double(), torch.float16))


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True, "scale": 0.3},
    "padding": {"attn_mask": (torch.arange(23) < torch.tensor([[23], [9]])).to(DEVICE)},
    "boolean": {"attn_mask": (torch.rand(2, 1, 17, 23, generator=seeded(0)) > 0.3).to(DEVICE)},
    "additive": {"attn_mask": torch.randn(2, 2, 17, 23, generator=seeded(0)).to(DEVICE)},
    "grouped": {"enable_gqa": True},
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(handle: Any, name: str) -> None:
    heads = 1 if name == "grouped" else 2
    inputs = leaves((2, 17, 2, 16), (2, 23, heads, 16), (2, 23, heads, 16), dtype=torch.float32)
    native, ours = (
        with_gradients(
            on_device(partial(dispatch_attention_fn, backend=AttentionBackendName(backend), **CALLS[name])), inputs
        )
        for backend in ("native", "diyfa")
    )
    for got, want in zip(ours, native, strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE)
    assert sum(handle.calls.values()) == 1


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "features apart": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "every second feature": lambda x: torch.stack((x, x), -1).flatten(3)[..., ::2],
    "one value": lambda x: x[..., :1].expand(x.shape),
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", STRIDED)
def test_features_without_stride_one(handle: Any, name: str, compiled: bool) -> None:
    """diffusers' native backend takes them; here they are copied, which is said once."""
    inputs = leaves((2, 17, 2, 16), (2, 23, 2, 16), (2, 23, 2, 16), dtype=torch.float32)

    def attend(backend: str, q: torch.Tensor, *kv: torch.Tensor) -> torch.Tensor:
        q, k, v = (STRIDED[name](x) for x in (q, *kv))
        return dispatch_attention_fn(q, k, v, backend=AttentionBackendName(backend))

    call = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        native, ours, _ = (
            with_gradients(on_device(partial(how, backend)), inputs)
            for how, backend in ((attend, "native"), (call, "diyfa"), (call, "diyfa"))
        )
    for got, want in zip(ours, native, strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE)
    assert len([x for x in told if "last stride is not 1" in str(x.message)]) == (0 if compiled else 1)


def test_dropout_and_compiled_graphs(handle: Any) -> None:
    q, k, v = (x.detach().to(DEVICE) for x in leaves(*[(1, 9, 2, 16)] * 3, dtype=torch.float32))

    def attend(q: torch.Tensor) -> torch.Tensor:
        return dispatch_attention_fn(q * 1.0, k, v, dropout_p=0.3, backend=AttentionBackendName("diyfa"))

    found = []
    for call in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(5)
        found.append(call(q))
    torch.manual_seed(5)
    want = diyfa.flash_attention_v2(q, k, v, dropout_p=0.3)
    assert all(torch.equal(x, want) for x in found)


REFUSED: dict[str, Callable[..., Any]] = {
    "return_lse=True of diffusers": lambda x: dispatch_attention_fn(x, x, x, attention_kwargs={"return_lse": True}),
    "context parallelism of diffusers": lambda x: dispatch_attention_fn(x, x, x, parallel_config=object()),
    "need enable_gqa=True": lambda x: dispatch_attention_fn(x, x[:, :, :1], x[:, :, :1]),
    "exclude each other": lambda x: dispatch_attention_fn(
        x, x, x, torch.ones(1, 5, dtype=torch.bool, device=DEVICE), is_causal=True
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused(handle: Any, reason: str) -> None:
    with diffusers.attention_backend("diyfa"), pytest.raises(ValueError, match=reason):
        REFUSED[reason](torch.zeros(1, 5, 2, 16, device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(handle: Any, dtype: torch.dtype) -> None:
    attend = partial(dispatch_attention_fn, is_causal=True, backend=AttentionBackendName("diyfa"))
    inputs = leaves(*[(2, 17, 2, 16)] * 3, dtype=dtype)
    assert_matches_reference(on_device(attend), inputs, "bshd", causal=True)
    assert sum(handle.calls.values()) == 1


def test_autocast_and_gradient_checkpointing(handle: Any) -> None:
    """Of a whole transformer in training: as near to float32 as PyTorch's attention is."""
    found = {}
    for backend, autocast, checkpointed in (
        ("native", False, False), ("native", True, False), ("diyfa", True, False), ("diyfa", True, True),
    ):  # fmt: skip
        model = flux().transformer.train()
        model.set_attention_backend(backend)
        if checkpointed:
            model.enable_gradient_checkpointing()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            out = denoised(model).float()
        out.square().sum().backward()
        gradients = torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])
        found[backend, autocast, checkpointed] = torch.cat((out.detach().flatten(), gradients)).cpu()
    expected, native, ours, again = found.values()
    assert torch.equal(ours, again)
    assert_within_budget_of(native, ours, expected.double(), unit=rounding_unit(expected.double(), torch.bfloat16))
    assert handle.calls == {"attention: diyfa": 6}  # two layers; the checkpointed forward runs twice


def test_export(handle: Any) -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return dispatch_attention_fn(q, k, v, is_causal=True, backend=AttentionBackendName("diyfa"))

    q, k, v = (x.detach().to(DEVICE) for x in leaves(*[(2, 19, 4, 32)] * 3))
    exported = torch.export.export(Attention(), (q, k, v)).module()
    assert torch.equal(exported(q, k, v), diyfa.flash_attention_v2(q, k, v, causal=True))


def test_removal() -> None:
    handle = use_in_diffusers()
    assert use_in_diffusers() is handle
    model = flux().transformer
    model.set_attention_backend("diyfa")
    handle.remove()
    assert not handle.active
    with diyfa.use_backend(DEVICE), pytest.raises((KeyError, TypeError)):
        dispatch_attention_fn(
            *[torch.zeros(1, 5, 2, 16)] * 3, backend=model.transformer_blocks[0].attn.processor._attention_backend
        )
    with pytest.raises(ValueError, match="must be one of"):
        model.set_attention_backend("diyfa")
    with pytest.raises(ValueError, match="diyfa"):
        AttentionBackendName("diyfa")
    assert draw_by_flux(flux()).shape == (1, 3, 16, 24)
