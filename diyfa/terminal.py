"""Printing to streams whose encoding lacks characters that diyfa prints, such as ASCII and Windows code pages."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# One character for each, so that the columns of a table stay aligned.
SUBSTITUTES = dict(zip("×…·–−→µμ\N{NO-BREAK SPACE}", "x..-->uu ", strict=True))
HANDLER = "diyfa.substitute"


def _substitute(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(SUBSTITUTES.get(c, "?") for c in error.object[error.start : error.end]), error.end


codecs.register_error(HANDLER, _substitute)


@contextmanager
def printable() -> Iterator[None]:
    """Substitute, inside the block, characters that the encoding of standard output or error does not have.

    They are printed as a similar character or "?". Streams without `reconfigure`, such as `io.StringIO`, have every
    character and do not change.
    """
    streams = [(s, s.errors) for s in (sys.stdout, sys.stderr) if hasattr(s, "reconfigure")]
    for stream, _ in streams:
        stream.reconfigure(errors=HANDLER)
    try:
        yield
    finally:
        for stream, errors in streams:
            stream.reconfigure(errors=errors)
