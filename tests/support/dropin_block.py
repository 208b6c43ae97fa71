"""A transformer block as programs on flash_attn 2.8 write it, and the same block in plain PyTorch.

Nothing here knows diyfa. `test_alias.py` runs it with flash_attn replaced; where the real package is installed,
`python tests/support/dropin_block.py --device cuda` runs it on that.

It makes one training step of each form of the block with the same weights and checks output and gradients: the error
against float64 must be at most twice that of the plain block in the same precision.
"""

from __future__ import annotations

import argparse

import torch
from flash_attn import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb

BATCH, SEQLEN, HEADS, HEADS_KV, HEAD_DIM = 3, 45, 4, 2, 32
DRAWS = 5
WIDTH = HEADS * HEAD_DIM
LENGTHS = (45, 17, 30)
DROPOUT = 0.2


class Block(torch.nn.Module):
    """Self-attention with rotary embedding, then attention to a memory, over a padded batch."""

    def __init__(self, dropout_p: float) -> None:
        super().__init__()
        self.dropout_p = dropout_p
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.rotary = RotaryEmbedding(HEAD_DIM)
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.query = torch.nn.Linear(WIDTH, WIDTH)
        self.memory = torch.nn.Linear(WIDTH, 2 * HEADS_KV * HEAD_DIM)
        self.dropped: torch.Tensor | None = None  # sign of the softmax weights, for the comparison

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        qkv = self.qkv(hidden).view(BATCH, SEQLEN, 3, HEADS, HEAD_DIM)
        qkv = self.rotary(qkv)
        packed, indices, cu_seqlens, max_seqlen, _ = unpad_input(qkv, mask)
        attended, _, s_dmask = flash_attn_varlen_qkvpacked_func(
            packed, cu_seqlens, max_seqlen, dropout_p=self.dropout_p, causal=True, return_attn_probs=True
        )
        self.dropped = torch.signbit(s_dmask) if self.dropout_p else None
        x = x + pad_input(self.out(attended.flatten(-2)), indices, BATCH, SEQLEN)

        query, indices, cu_seqlens_q, max_seqlen_q, _ = unpad_input(self.query(x), mask)
        memory = self.memory(x).view(BATCH, SEQLEN, 2 * HEADS_KV, HEAD_DIM)
        key, value, _, cu_seqlens_k, max_seqlen_k = self.unpadded_memory(memory, mask)
        cos, sin = self.rotary._cos_cached, self.rotary._sin_cached
        query = apply_rotary_emb(
            query.view(-1, HEADS, HEAD_DIM), cos, sin, cu_seqlens=cu_seqlens_q, max_seqlen=max_seqlen_q
        )
        attended = flash_attn_varlen_func(
            query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=0.2
        )
        return x + pad_input(attended.flatten(-2), indices, BATCH, SEQLEN)

    def unpadded_memory(self, memory, mask):
        packed, indices, cu_seqlens, max_seqlen, _ = unpad_input(memory, mask)
        key, value = packed.split(HEADS_KV, dim=-2)
        return key, value, indices, cu_seqlens, max_seqlen


class PlainBlock(torch.nn.Module):
    """The same mathematics on padded tensors with masks; `dropped` (B, H, S, S) tells what dropout removes."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block, self.dropped = block, block.dropped

    def attend(self, q, k, v, visible, scale, dropped=None, dropout_p=0.0):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = (q * scale) @ k.transpose(-1, -2)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(~visible, float("-inf"))
        weights = scores.softmax(-1).nan_to_num(0.0)
        if dropped is not None:
            weights = weights.masked_fill(dropped, 0.0) / (1 - dropout_p)
        return (weights.to(v.dtype) @ v).transpose(1, 2).flatten(-2)

    def rotate(self, x):
        position = torch.arange(SEQLEN, device=x.device, dtype=torch.float32)
        angle = torch.outer(position, 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=x.device) / HEAD_DIM))
        dtype = self.block.rotary._cos_cached.dtype  # of the block that is compared
        wide = torch.promote_types(x.dtype, torch.float32)
        cos, sin = (t.to(dtype).to(wide)[:, None] for t in (angle.cos(), angle.sin()))
        a, b = x.to(wide).chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        block = self.block
        keys, queries = mask[:, None, None, :].bool(), mask[:, None, :, None].bool()
        causal = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool, device=x.device).tril()
        q, k, v = block.qkv(block.norm(x)).view(BATCH, SEQLEN, 3, HEADS, HEAD_DIM).unbind(2)
        dropped = None if self.dropped is None else self.dropped[:, :, :SEQLEN, :SEQLEN]
        attended = self.attend(
            self.rotate(q), self.rotate(k), v, keys & queries & causal, HEAD_DIM**-0.5, dropped, block.dropout_p
        )
        x = x + block.out(attended) * mask[..., None]
        query = self.rotate(block.query(x).view(BATCH, SEQLEN, HEADS, HEAD_DIM))
        key, value = block.memory(x).view(BATCH, SEQLEN, 2 * HEADS_KV, HEAD_DIM).split(HEADS_KV, -2)
        return x + self.attend(query, key, value, keys & queries, 0.2) * mask[..., None]


def step(model, block, x, mask, dtype):
    """One training step: the output, and the gradients of the input and of every weight, in float64."""
    x = x.to(dtype).requires_grad_()
    out = model(x, mask)
    weight = torch.linspace(-1, 1, out.numel(), device=x.device).view_as(out) * mask[..., None]
    gradients = torch.autograd.grad((out.float() * weight).sum(), [x, *block.parameters()])
    return [t.detach().double() for t in (out * mask[..., None], *gradients)]


def check(device: str, dtype: torch.dtype, dropout_p: float) -> float:
    """The largest error of any result as a share of what is allowed."""
    torch.manual_seed(0)
    block = Block(dropout_p).to(device, dtype)
    x = torch.randn(BATCH, SEQLEN, WIDTH, device=device).to(dtype)
    mask = (torch.arange(SEQLEN, device=device) < torch.tensor(LENGTHS, device=device)[:, None]).int()
    got = step(block, block, x, mask, dtype)
    # PyTorch's own error, the largest over several inputs: a gradient of few values is exact by luck in some of them.
    plain, input_draws = PlainBlock(block), [x, *(torch.randn_like(x) for _ in range(DRAWS - 1))]
    low = [step(plain, block, inputs, mask, dtype) for inputs in input_draws]
    block.double()
    exact = [step(plain, block, inputs, mask, torch.float64) for inputs in input_draws]
    names = ["out", "x", *(name for name, _ in block.named_parameters())]
    worst = 0.0
    for i, (name, a) in enumerate(zip(names, got, strict=True)):
        c = exact[0][i]
        allowed = 2 * max(float((b[i] - e[i]).abs().max()) for b, e in zip(low, exact, strict=True))
        allowed += 1e-6 * float(c.abs().max())
        error_share = float((a - c).abs().max() / allowed)
        worst = max(worst, error_share)
        if not error_share <= 1:
            raise SystemExit(f"{dtype}, dropout {dropout_p}: {name} has {error_share:.2f} times the error allowed")
    return worst


def check_dense(device: str, dtype: torch.dtype) -> None:
    """Unpadded calls agree with each other whether packed or not."""
    qkv = torch.randn(2, 33, 3, HEADS, HEAD_DIM, device=device).to(dtype)
    packed = flash_attn_qkvpacked_func(qkv, causal=True, window_size=(16, 16))
    unpacked = flash_attn_func(*qkv.unbind(2), causal=True, window_size=(16, 0))
    if not torch.equal(packed, unpacked):
        raise SystemExit("packed and separate inputs give different results")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", action="append", choices=["float16", "bfloat16", "float32"])
    arguments = parser.parse_args()
    for name in arguments.dtype or ["float16", "bfloat16"]:
        dtype = getattr(torch, name)
        for dropout_p in (0.0, DROPOUT):
            worst = check(arguments.device, dtype, dropout_p)
            print(f"{name}, dropout {dropout_p}: worst error is {worst:.2f} of what is allowed")
        check_dense(arguments.device, dtype)
    print("the block does what it should")


if __name__ == "__main__":
    main()
