"""The blocks of keys that a causal tile visits."""


def block_range(row0, rows, seqlen_q, seqlen_k, block_n):
    diagonal = seqlen_k - seqlen_q  # query i sees the keys up to i + diagonal
    first_row = min(max(row0 + diagonal + 1, 0), seqlen_k)  # keys that the first row sees: the fewest
    last_row = min(max(row0 + rows + diagonal, 0), seqlen_k)  # keys that the last row sees: the most
    n_whole = first_row // block_n
    n_visited = (last_row + block_n - 1) // block_n
    return n_whole, n_visited


solution = block_range
