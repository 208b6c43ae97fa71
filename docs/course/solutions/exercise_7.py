"""Stage and parities of an item of the ring."""


def ring_wait(item, stages):
    stage = item % stages
    full_parity = (item // stages) % 2  # the n-th item of a stage completes phase n of `full`
    empty_parity = full_parity ^ 1  # and waits for the end of phase n - 1 of `empty`
    return stage, full_parity, empty_parity


solution = ring_wait
