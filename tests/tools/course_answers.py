"""Plausible answers to the course's exercises, as changes of the solution: wrong ones and right ones.

The check must refuse those of `WRONG` with a hint, and accept those of `RIGHT`.
"""

from __future__ import annotations

WRONG: dict[int, dict[str, tuple[str, str]]] = {
    1: {
        "no maximum is subtracted": ("e = torch.exp(x - m)", "e = torch.exp(x)"),
        "one maximum for all rows": ("m = x.max(-1, keepdim=True).values", "m = x.max().expand(x.shape[0], 1)"),
        "empty rows are NaN": ('m = m.masked_fill(m == float("-inf"), 0.0)', "m = m"),
        "the sum in float16": ("e.sum(-1, keepdim=True)", "e.half().sum(-1, keepdim=True).float()"),
        "PyTorch's softmax": ("return e / total", "return torch.softmax(x, -1).nan_to_num(0.0)\n    return e / total"),
        "the scores are changed in place": ("e = torch.exp(x - m)", "e = torch.exp(x.sub_(m))"),
        "nothing is returned": ("return e /", "e /"),
    },
    2: {
        "the mean of both": ("weight_a = torch.exp(lse_a - m_ref)", "weight_a = torch.exp(lse_b - m_ref)"),
        "no maximum is subtracted": ("m_ref = m.masked_fill(m == float", "m_ref = 0 * m.masked_fill(m == float"),
        "two empty sides are NaN": ('m.masked_fill(m == float("-inf"), 0.0)', "m"),
        "lse is the larger one": ("m_ref + torch.log(total)", "m"),
        "lse of no keys is +inf": (
            "m_ref + torch.log(total)", '(m_ref + torch.log(total)).masked_fill(total == 0, float("inf"))'),
        "only if all rows are empty": (
            'm_ref = m.masked_fill(m == float("-inf"), 0.0)',
            'm_ref = m if (m > float("-inf")).any() else 0 * lse_a.exp()'),
        "PyTorch's logaddexp": ("torch.log(total)", "torch.logaddexp(lse_a - m_ref, lse_b - m_ref)"),
        "only the output is returned": ("return out, m_ref", "return out  # m_ref"),
    },
    3: {
        "aligned to the top left": ("diagonal = seqlen_k - seqlen_q", "diagonal = 0"),
        "one block too few": ("(last_row + block_n - 1) // block_n", "last_row // block_n"),
        "negative ranges": ("max(row0 + rows + diagonal, 0)", "row0 + rows + diagonal"),
        "a fraction of a block": ("first_row // block_n", "first_row / block_n"),
        "masked in place of visited": ("return n_whole, n_visited", "return n_whole, n_visited - n_whole"),
        "nothing is returned": ("return n_whole, n_visited", "n_whole, n_visited"),
    },
    4: {
        "the gradient of lse is forgotten": (" - dlse", ""),
        "no delta": ("dp - delta[:, None]", "dp + dlse[:, None]"),
        "lse reaches all keys alike": (
            "return p * (dp - delta[:, None])", "return p * (dp - delta[:, None] - dlse[:, None]) + dlse[:, None]"),
        "in float16": ("return p * (dp - delta[:, None])", "return (p * (dp - delta[:, None])).half()"),
        "autograd": (
            "dp = dout @ v.mT", "import torch\n\n    s = p.log().requires_grad_()\n    w = torch.softmax(s, -1)\n"
            "    return torch.autograd.grad([w @ v, s.logsumexp(-1)], s, [dout, dlse])[0]\n    dp = dout @ v.mT"),
    },
    5: {
        "the future is seen": ("(distance >= 0) & ", ""),
        "keys outside the window are visited": ("tl.maximum(row0 - window, 0) // BLOCK_N * BLOCK_N", "0"),
        "the first block is skipped": (
            "tl.maximum(row0 - window, 0) // BLOCK_N * BLOCK_N",
            "tl.cdiv(tl.maximum(row0 - window, 0), BLOCK_N) * BLOCK_N"),
        "rows without a key in the first block": ("-3.0e38", 'float("-inf")'),
        "the accumulator in float16": (
            "acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v)",
            "acc = (acc * alpha[:, None] + tl.dot(p.to(v.dtype), v)).to(tl.float16).to(tl.float32)"),
        "keys behind the diagonal are visited": ("last = tl.minimum(row0 + BLOCK_M, seqlen)", "last = seqlen"),
        "the last ragged block is missing": (
            "last = tl.minimum(row0 + BLOCK_M, seqlen)",
            "last = tl.minimum(row0 + BLOCK_M, seqlen // BLOCK_N * BLOCK_N)"),
        "one batch": ("grid = (triton.cdiv(seqlen, 32), batch * heads)", "grid = (triton.cdiv(seqlen, 32), heads)"),
        "the scale of one head dim": ("head_dim**-0.5", "0.25"),
        "PyTorch's attention": (
            "    windowed_kernel[grid](", "    i = torch.arange(seqlen)\n    distance = i[:, None] - i\n"
            "    mask = (distance >= 0) & (distance <= window)\n"
            "    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)\n"
            "    windowed_kernel[grid]("),
        "diyfa's attention": (
            "    windowed_kernel[grid](", "    import diyfa\n\n"
            '    return diyfa.flash_attention(q, k, v, window=(window, 0), backend="cpu")\n    windowed_kernel[grid]('),
    },
    6: {
        "neighbours": ("(i, even - 1 - i)", "(2 * i, 2 * i + 1)"),
        "the last block is lost": ("if n_blocks % 2:", "if False:"),
        "the middle block alone": (
            "even = n_blocks - n_blocks % 2\n",
            "n = n_blocks\n    return [(i, n - 1 - i) for i in range(n // 2)] + [(n // 2,)] * (n % 2)\n    even = n\n"),
        "blocks without tuples": ("return programs", "return [block for blocks in programs for block in blocks]"),
        "nothing is returned": ("return programs", "programs"),
    },
    7: {
        "the parity of the item": ("(item // stages) % 2", "item % 2"),
        "the producer waits for the wrong phase": ("full_parity ^ 1", "full_parity"),
        "numbers of phases": ("(item // stages) % 2", "item // stages"),
        "both wait for the same": ("return stage, full_parity, empty_parity", "return stage, full_parity, full_parity"),
        "one parity": ("return stage, full_parity, empty_parity", "return stage, full_parity"),
    },
    8: {
        "the page of the table is ignored": ("int(block_table[b, position // page_size])", "position // page_size"),
        "one position too far": ("position = int(lengths[b])", "position = int(lengths[b]) + 1"),
        "lengths stay": ("lengths + 1", "lengths"),
        "a fixed page size": ("page_size = cache.shape[1]", "page_size = 4"),
        "a copy of the cache": ("page_size = cache.shape[1]", "cache = cache.clone()\n    page_size = cache.shape[1]"),
        "one token for all": ("= new[b]", "= new[0]"),
        "the cache is returned": ("return lengths + 1", "return cache"),
    },
}  # fmt: skip

RIGHT: dict[int, dict[str, tuple[str, str]]] = {
    1: {
        "NaN is replaced": ("e = torch.exp(x - m)", "e = torch.exp(x - x.amax(-1, keepdim=True)).nan_to_num(0.0)"),
        "a finite maximum": ('m.masked_fill(m == float("-inf"), 0.0)', "m.clamp(min=torch.finfo(x.dtype).min)"),
    },
    2: {
        "log1p": (
            "m_ref + torch.log(total)",
            "torch.where(total == 0, m, m_ref + torch.log1p(torch.exp(torch.minimum(lse_a, lse_b) - m_ref)))"),
        "rows one by one": (
            "    out = (weight_a", "    rows = range(len(m))\n"
            "    out = torch.stack([(weight_a[i] * out_a[i] + weight_b[i] * out_b[i]) / safe[i] for i in rows])\n"
            "    return out, m_ref + torch.log(total)\n    out = (weight_a"),
    },
    3: {
        "a list": ("return n_whole, n_visited", "return [n_whole, n_visited]"),
        "rounded up by the minus sign": ("(last_row + block_n - 1) // block_n", "-(-last_row // block_n)"),
        "rows of the last tile are counted": ("row0 + rows + diagonal", "min(row0 + rows, seqlen_q) + diagonal"),
    },
    4: {
        "delta from P and dP": ("(dout * out).sum(-1)", "(p * dp).sum(-1)"),
        "the Jacobian of softmax": (
            "return p * (dp - delta[:, None])",
            "import torch\n\n    jacobian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]\n"
            "    return (jacobian @ dp[:, :, None])[:, :, 0] + p * dlse[:, None]"),
    },
    5: {
        "blocks begin with the window": (
            "tl.maximum(row0 - window, 0) // BLOCK_N * BLOCK_N", "tl.maximum(row0 - window, 0)"),
        "a reference that is finite": ("-3.0e38, tl.float32)  # finite", "-1.0e30, tl.float32)  # finite"),
        "small programs": (
            "grid = (triton.cdiv(seqlen, 32), batch * heads)\n    windowed_kernel",
            "tiles = dict(HEAD_DIM=head_dim, BLOCK_M=16, BLOCK_N=64)\n"
            "    grid = (triton.cdiv(seqlen, 16), batch * heads)\n"
            "    windowed_kernel[grid](q, k, v, out, head_dim**-0.5, seqlen, window, **tiles)\n"
            "    return out\n    windowed_kernel"),
    },
    6: {
        "another order": ("return programs", "return [tuple(reversed(blocks)) for blocks in reversed(programs)]"),
        "a set": ("return programs", "return set(programs)"),
    },
    7: {
        "truth values": ("full_parity ^ 1", "not full_parity"),
        "a list": ("return stage, full_parity, empty_parity", "return [stage, full_parity, empty_parity]"),
    },
    8: {
        "lengths in place": ("return lengths + 1", "return lengths.add_(1)"),
        "a flat view": (
            "cache[page, position % page_size] = new[b]",
            "cache.view(-1, *cache.shape[2:])[page * page_size + position % page_size] = new[b]"),
        "all sequences at once": (
            "    for b in range", "    import torch\n\n    rows = torch.arange(len(lengths))\n"
            "    pages = block_table[rows, (lengths // page_size).long()].long()\n"
            "    cache[pages, (lengths % page_size).long()] = new\n    return lengths + 1\n    for b in range"),
    },
}  # fmt: skip
