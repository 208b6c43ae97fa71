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


def spills_in_loops(sass: str) -> list[int]:
    """Return for each loop over keys of a Hopper kernel how many of its instructions read or write spilled registers.

    Such a loop is closed by a backward branch and has wgmma products, but neither copies nor stores rows of out to
    global memory. A loop that does is the loop over tiles, or a part of it.
    """
    code = [(int(address, 16), text) for address, text in _LINE.findall(sass)]
    number = {address: i for i, (address, _) in enumerate(code)}
    spills = []
    for i, (address, text) in enumerate(code):
        branch = _BRANCH.search(text)
        if branch is None or int(branch[1], 16) >= address:
            continue
        body = [text for _, text in code[number[int(branch[1], 16)] : i + 1]]
        if any("GMMA." in text for text in body) and not any(
            re.search(r"\b(UTMASTG|STG\.E\.128)\b", text) for text in body
        ):
            spills.append(sum(re.search(r"\b(LDL|STL)\b", text) is not None for text in body))
    return spills
