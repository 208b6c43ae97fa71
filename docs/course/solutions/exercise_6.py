"""Two query blocks for each program, so that all of them work equally long."""


def pairs(n_blocks):
    even = n_blocks - n_blocks % 2
    programs = [(i, even - 1 - i) for i in range(even // 2)]  # even + 1 tiles of keys each
    if n_blocks % 2:
        programs.append((n_blocks - 1,))  # as many: the last block sees n_blocks = even + 1 tiles
    return programs


solution = pairs
