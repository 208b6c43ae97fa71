"""Analysis of machine code for the gate: do loops around tensor-core products touch local memory?"""

from __future__ import annotations

import re
import subprocess
import tempfile

from triton import knobs

_LINE = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);")
_BRANCH = re.compile(r"\bBRA\b.* 0x([0-9a-f]+)")


def disassembled(cubin: bytes) -> str:
    """Return the machine code of a compiled kernel as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.check_output([knobs.nvidia.cuobjdump.path, "-sass", file.name], text=True)


def loops_over_keys(sass: str) -> list[list[str]]:
    """Return the instructions of each loop over keys of a Hopper kernel.

    Such a loop is closed by a conditional backward branch, has wgmma products, and has no other loop with products
    inside. An unconditional one closes the loop over tiles, or returns from code behind the kernel's end.
    """
    code = [(int(address, 16), text) for address, text in _LINE.findall(sass)]
    number = {address: i for i, (address, _) in enumerate(code)}
    loops = []
    for i, (address, text) in enumerate(code):
        branch = _BRANCH.search(text)
        if branch is not None and int(branch[1], 16) < address:
            start = number[int(branch[1], 16)]
            if any("GMMA." in line for _, line in code[start : i + 1]):
                loops.append((start, i))
    bodies = []
    for start, end in loops:
        has_inner = any((start, end) != (i, j) and start <= i and j <= end for i, j in loops)
        if code[end][1].startswith("@") and not has_inner:
            bodies.append([text for _, text in code[start : end + 1]])
    return bodies


def spills_in_loops(sass: str) -> list[int]:
    """Return for each of `loops_over_keys` how many of its instructions read or write spilled registers."""
    return [sum(re.search(r"\b(LDL|STL)\b", text) is not None for text in body) for body in loops_over_keys(sass)]
