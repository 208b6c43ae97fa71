"""Printing where the output's encoding lacks characters that diyfa prints: ASCII, the code pages of Windows."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# One character each, so that the columns of a table stay where they are.
SUBSTITUTES = {
    "×": "x",
    "…": ".",
    "·": ".",
    "–": "-",
    "−": "-",
    "→": ">",
    "µ": "u",
    "μ": "u",
    "\N{NO-BREAK SPACE}": " ",
}
HANDLER = "diyfa.substitute"


def _substitute(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(SUBSTITUTES.get(c, "?") for c in error.object[error.start : error.end]), error.end


codecs.register_error(HANDLER, _substitute)


@contextmanager
def printable() -> Iterator[None]:
    """Inside, standard output and error print a similar character, or "?", for one that their encoding does not have.

    Streams that cannot be told so, as `io.StringIO`, have every character and are left alone.
    """
    streams = [(s, s.errors) for s in (sys.stdout, sys.stderr) if hasattr(s, "reconfigure")]
    for stream, _ in streams:
        stream.reconfigure(errors=HANDLER)
    try:
        yield
    finally:
        for stream, errors in streams:
            stream.reconfigure(errors=errors)
