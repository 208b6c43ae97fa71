"""Plausible wrong answers to the course's exercises: what each changes in the solution, which the check must refuse."""

from __future__ import annotations

WRONG: dict[int, dict[str, tuple[str, str]]] = {
    1: {
        "no maximum is subtracted": ("e = torch.exp(x - m)", "e = torch.exp(x)"),
        "one maximum for all rows": ("m = x.max(-1, keepdim=True).values", "m = x.max().expand(x.shape[0], 1)"),
        "empty rows are NaN": ('m = m.masked_fill(m == float("-inf"), 0.0)', "m = m"),
        "empty rows are divided by 0": ("total.masked_fill(total == 0, 1.0)", "total"),
        "the sum over the wrong dimension": ("e.sum(-1, keepdim=True)", "e.sum(0, keepdim=True)"),
    },
    2: {
        "the mean of both": ("weight_a = torch.exp(lse_a - m_ref)", "weight_a = torch.exp(lse_b - m_ref)"),
        "no maximum is subtracted": ("m_ref = m.masked_fill(m == float", "m_ref = 0 * m.masked_fill(m == float"),
        "two empty sides are NaN": ('m.masked_fill(m == float("-inf"), 0.0)', "m"),
        "two empty sides are divided by 0": ("safe = total.masked_fill(total == 0, 1.0)", "safe = total"),
        "lse is the larger one": ("m_ref + torch.log(total)", "m"),
        "weights are not normalised": ("(weight_a / safe)[:, None] * out_a", "weight_a[:, None] * out_a"),
    },
    3: {
        "aligned to the top left": ("diagonal = seqlen_k - seqlen_q", "diagonal = 0"),
        "the diagonal is not seen": ("row0 + diagonal + 1", "row0 + diagonal"),
        "one block too few": ("(last_row + block_n - 1) // block_n", "last_row // block_n"),
        "negative ranges": ("max(row0 + rows + diagonal, 0)", "row0 + rows + diagonal"),
        "the last row decides both": ("first_row // block_n", "last_row // block_n"),
    },
    4: {
        "the gradient of lse is forgotten": (" - dlse", ""),
        "the sign of lse": (" - dlse", " + dlse"),
        "no delta": ("dp - delta[:, None]", "dp + dlse[:, None]"),
        "delta of the scores' gradient": ("(dout * out).sum(-1)", "dp.sum(-1)"),
    },
    5: {
        "one key too few": ("distance <= window", "distance < window"),
        "the future is seen": ("(distance >= 0) & ", ""),
        "keys outside the window are visited": ("tl.maximum(row0 - window, 0) // BLOCK_N * BLOCK_N", "0"),
        "the first block is skipped": (
            "tl.maximum(row0 - window, 0) // BLOCK_N * BLOCK_N",
            "tl.cdiv(tl.maximum(row0 - window, 0), BLOCK_N) * BLOCK_N",
        ),
        "rows without a key in the first block": ("-3.0e38", 'float("-inf")'),
        "the accumulator is not rescaled": ("acc * alpha[:, None] +", "acc +"),
    },
    6: {
        "neighbours": ("(i, n_blocks - 1 - i)", "(2 * i, 2 * i + 1)"),
        "the middle block is lost": ("if n_blocks % 2:", "if False:"),
        "the middle block twice": ("range(n_blocks // 2)", "range((n_blocks + 1) // 2)"),
        "off by one": ("n_blocks - 1 - i)", "n_blocks - i)"),
    },
    7: {
        "the parity of the item": ("(item // stages) % 2", "item % 2"),
        "the producer waits for the wrong phase": ("full_parity ^ 1", "full_parity"),
        "the producer never waits": ("empty_parity = full_parity ^ 1", "empty_parity = 1"),
        "the wrong stage": ("stage = item % stages", "stage = item // stages % stages"),
    },
    8: {
        "the page of the table is ignored": ("int(block_table[b, position // page_size])", "position // page_size"),
        "one position too far": ("position = int(lengths[b])", "position = int(lengths[b]) + 1"),
        "one position too early": ("position = int(lengths[b])", "position = max(int(lengths[b]) - 1, 0)"),
        "every token is the first of its page": ("position % page_size]", "0]"),
        "lengths stay": ("lengths + 1", "lengths"),
    },
}
