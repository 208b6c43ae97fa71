"""Two query blocks for each program, so that all of them work equally long."""


def pairs(n_blocks):
    programs = [(i, n_blocks - 1 - i) for i in range(n_blocks // 2)]
    if n_blocks % 2:
        programs.append((n_blocks // 2,))
    return programs


solution = pairs
