"""diyfa as a kernel of Hugging Face `kernels`: `python -m diyfa.integrations.hub_kernel FOLDER` builds the folder.

One variant, `torch-universal`, serves every backend, because all code is Python. `kernels` gives a kernel's module its
own name. So that module only imports the package beside it and forwards its names. The package keeps the name diyfa,
because its operators can exist once in a process.

    from kernels import get_kernel

    diyfa = get_kernel("someone/diyfa", version=1, trust_remote_code=True)
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import diyfa

VARIANT = "torch-universal"
ENTRY = '''"""diyfa {version}, of this folder or installed."""

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("diyfa") is None:
    sys.path.append(str(Path(__file__).parent))

import diyfa

if diyfa.__version__ != "{version}":
    raise ImportError(f"diyfa {{diyfa.__version__}} is installed, which cannot be in one process with {version}")

from diyfa.flash_attn_interface import *


def __getattr__(name):
    return getattr(diyfa, name)
'''


def build(folder: Path) -> Path:
    """Write the repository of a kernel into `folder` and return the folder of its variant.

    Raises:
        FileExistsError: `folder` has this variant already.
    """
    variant = folder / "build" / VARIANT
    variant.mkdir(parents=True)
    shutil.copytree(Path(diyfa.__file__).parent, variant / "diyfa", ignore=shutil.ignore_patterns("__pycache__"))
    (variant / "__init__.py").write_text(ENTRY.format(version=diyfa.__version__), encoding="utf-8")
    version = int(diyfa.__version__.split(".")[0]) + 1  # counts incompatible interfaces, from 1
    metadata = {
        "name": "diyfa", "id": f"diyfa_{diyfa.__version__.replace('.', '_')}", "version": version,
        "license": "Apache-2.0", "python-depends": [], "backend": {"type": "cpu"},
    }  # fmt: skip
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    return variant


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the folder of a Hugging Face kernel.")
    parser.add_argument("folder", type=Path, help="what becomes the repository of the kernel")
    print(build(parser.parse_args().folder))


if __name__ == "__main__":
    main()
