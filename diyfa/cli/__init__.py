"""The command `diyfa`. `pip install 'diyfa[cli]'` installs the libraries it needs, typer and rich."""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    """Run the command line on `sys.argv`."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"The diyfa command needs {' and '.join(missing)}: pip install 'diyfa[cli]'")
    from diyfa.cli.startup import prepare_environment

    prepare_environment()
    from diyfa.cli.app import app
    from diyfa.terminal import printable

    with printable():
        app()
