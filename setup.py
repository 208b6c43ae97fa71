"""The page of a package index: the README with absolute links. Everything else is in pyproject.toml.

A source distribution has the kernels once, in `backends`. The link to them, which an editable install and the tests
need, is made here.
"""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def index_page() -> str:
    """Return the README; its links and pictures lead into the repository, which pyproject.toml names."""
    repository = re.search(r'^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)[1]
    text = (ROOT / "README.md").read_text("utf-8")
    text = re.sub(r"!\[([^\]]*)\]\((?!https:)([^)]+)\)", rf"![\1]({repository}/raw/main/\2)", text)
    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!https:|#)([^)]+)\)", rf"[\1]({repository}/blob/main/\2)", text)


link = ROOT / "diyfa" / "backends"
if not link.exists():
    link.symlink_to(Path("..", "backends"), target_is_directory=True)
setup(long_description=index_page(), long_description_content_type="text/markdown")
