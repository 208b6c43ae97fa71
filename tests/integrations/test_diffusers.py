"""Pipelines of diffusers by diyfa beside PyTorch's attention: a diffusion transformer, and a UNet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from eager_budget import DEVICE, leaves, with_gradients

import diyfa
from diyfa.integrations import use_in_diffusers, use_in_pytorch

TOLERANCE = {"atol": 2e-5, "rtol": 2e-4}


@pytest.fixture
def handle() -> Iterator[Any]:
    handle = use_in_diffusers()
    with diyfa.use_backend("cpu") if DEVICE == "cpu" else nullcontext():
        yield handle
    handle.remove()


def vae(channels: int) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(16, 16), down_block_types=("DownEncoderBlock2D",) * 2, layers_per_block=1,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=channels, norm_num_groups=4,
        use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.0, scaling_factor=1.0,
    )  # fmt: skip


def flux() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, pooled_projection_dim=20, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    pipeline = diffusers.FluxPipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(), vae(4), None, None, None, None, transformer
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(DEVICE)


def draw_by_flux(pipeline: Any) -> torch.Tensor:
    words = torch.randn(1, 7, 24, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return pipeline(
        prompt_embeds=words, pooled_prompt_embeds=words[:, 0, :20], height=16, width=24, num_inference_steps=2,
        output_type="pt", generator=torch.Generator().manual_seed(2),
    ).images  # fmt: skip


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
        torch.manual_seed(3)
        with torch.device(DEVICE):
            out = model(
                torch.randn(2, 12, 16), torch.randn(2, 7, 24), torch.randn(2, 20), torch.rand(2),
                torch.randint(0, 9, (12, 3)), torch.zeros(7, 3), return_dict=False,
            )[0]  # fmt: skip
        out.square().sum().backward()
        found.append({name: x.grad for name, x in model.named_parameters()})
    native, ours = found
    largest = max(float(x.abs().max()) for x in native.values())
    for name, want in native.items():
        torch.testing.assert_close(ours[name] / largest, want / largest, **TOLERANCE)
    assert handle.calls == {"attention: diyfa": 2}


def test_a_unet() -> None:
    """It calls PyTorch's attention itself."""
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(16, 32), layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=24, attention_head_dim=4,
    )  # fmt: skip
    pipeline = diffusers.StableDiffusionPipeline(
        vae(4), None, None, unet, diffusers.DDIMScheduler(), None, None, requires_safety_checker=False
    )
    pipeline.set_progress_bar_config(disable=True)
    words = torch.randn(1, 7, 24, generator=torch.Generator().manual_seed(1))

    def draw() -> torch.Tensor:
        return pipeline(
            prompt_embeds=words, negative_prompt_embeds=-words, num_inference_steps=2, output_type="pt",
            generator=torch.Generator().manual_seed(2),
        ).images  # fmt: skip

    expected = draw()
    handle = use_in_pytorch("cpu")
    try:
        with diyfa.use_backend("cpu"):
            torch.testing.assert_close(draw(), expected, **TOLERANCE)
        assert handle.calls["scaled_dot_product_attention: diyfa"] >= 12
    finally:
        handle.remove()


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True, "scale": 0.3},
    "padding": {"attn_mask": torch.arange(23) < torch.tensor([[23], [9]])},
    "boolean": {"attn_mask": torch.rand(2, 1, 17, 23, generator=torch.Generator().manual_seed(0)) > 0.3},
    "additive": {"attn_mask": torch.randn(2, 2, 17, 23, generator=torch.Generator().manual_seed(0))},
    "grouped": {"enable_gqa": True},
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(handle: Any, name: str) -> None:
    heads = 1 if name == "grouped" else 2
    inputs = leaves((2, 17, 2, 16), (2, 23, heads, 16), (2, 23, heads, 16), dtype=torch.float32, device=DEVICE)
    options = {key: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for key, x in CALLS[name].items()}
    native, ours = (
        with_gradients(dispatch_attention_fn, inputs, backend=AttentionBackendName(backend), **options)
        for backend in ("native", "diyfa")
    )
    for got, want in zip(ours, native, strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE)
    assert sum(handle.calls.values()) == 1


def test_dropout_and_compiled_graphs(handle: Any) -> None:
    q, k, v = (x.detach() for x in leaves(*[(1, 9, 2, 16)] * 3, dtype=torch.float32, device=DEVICE))

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
    "exclude each other": lambda x: dispatch_attention_fn(x, x, x, torch.ones(1, 5, dtype=torch.bool), is_causal=True),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused(handle: Any, reason: str) -> None:
    with diffusers.attention_backend("diyfa"), pytest.raises(ValueError, match=reason):
        REFUSED[reason](torch.zeros(1, 5, 2, 16))


def test_removal() -> None:
    handle = use_in_diffusers()
    assert use_in_diffusers() is handle
    model = flux().transformer
    model.set_attention_backend("diyfa")
    handle.remove()
    assert not handle.active
    with diyfa.use_backend("cpu"), pytest.raises((KeyError, TypeError)):
        dispatch_attention_fn(
            *[torch.zeros(1, 5, 2, 16)] * 3, backend=model.transformer_blocks[0].attn.processor._attention_backend
        )
    with pytest.raises(ValueError, match="must be one of"):
        model.set_attention_backend("diyfa")
    with pytest.raises(ValueError, match="diyfa"):
        AttentionBackendName("diyfa")
    assert draw_by_flux(flux()).shape == (1, 3, 16, 24)
