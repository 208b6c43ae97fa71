"""Write another address of the project: `python tests/tools/addresses.py https://HOST/OWNER/NAME [DOCUMENTATION]`.

The address that is there now is in pyproject.toml and in the few files below, which need absolute links.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = ("pyproject.toml", "CITATION.cff", ".github/ISSUE_TEMPLATE/config.yml")


def addresses() -> dict[str, str]:
    """Return the project's addresses by name, from pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.split("[project.urls]")[1].split("\n[")[0]
    return dict(re.findall(r'^(\w+) = "([^"]+)"$', section, re.MULTILINE))


def main(repository: str, documentation: str) -> None:
    """Replace the repository's and the documentation's address in all files."""
    now = addresses()
    for name in FILES:
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        text = text.replace(now["Documentation"], documentation).replace(now["Repository"], repository)
        text = text.replace(f'Homepage = "{now["Homepage"]}"', f'Homepage = "{documentation}"')
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    main(sys.argv[1].rstrip("/"), sys.argv[-1].rstrip("/"))
