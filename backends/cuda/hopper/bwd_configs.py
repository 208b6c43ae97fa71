"""Which problems the Hopper backward (`hopper/bwd.py`) runs, and with which config. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_N = 128  # keys of a program
CONSUMERS = 2  # warpgroups, with 64 of them each
BOX_COLUMNS = 64  # of the TMA boxes that make up a tile


@dataclass(frozen=True)
class Sm90BwdConfig:
    """Tile and schedule of the Hopper backward."""

    block_m: int  # queries of a block
    stages_q: int
    stages_do: int
    late: bool = True  # dQ of a block is formed beside the scores of the next one
    red: bool = False  # dQ is added from registers, else through shared memory and TMA
    dq_first: bool = True  # late: before the scores; else before dK
    early_dp: bool = False  # late: dP is started before dQ leaves
    consumer_registers: int = 240
    producer_registers: int = 24
    skip: str = ""  # an experiment: what is left out
    measured: str = ""  # device, date, TFLOP/s
