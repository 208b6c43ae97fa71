"""The switch for multibuffering, the compiler's overlap of loads, products and vector work.

With it, the compiler gives a loop several copies of its buffers, in on-chip memory and in the workspace between cube
and vector cores, and orders the accesses by flags. Some releases of CANN miscompile this: a kernel hangs or computes
wrong values. DIYFA_NPU_MULTIBUFFER=0 compiles every kernel without it. `diyfa first-run` and `diyfa validate` try what
hangs or is wrong without it. If that is right, they keep so in one small file (`path`), which holds until the compiler
or triton-ascend changes.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from diyfa.backends.npu.runtime.compat import stable_options
from diyfa.backends.npu.runtime.compiler import compiler_version
from diyfa.npu_stacks import installed_version
from diyfa.tuning import cache_dir

VARIABLE = "DIYFA_NPU_MULTIBUFFER"
WORKSPACE_OPTIONS = ("limit_auto_multi_buffer_only_for_local_buffer", "set_workspace_multibuffer")


def path() -> Path | None:
    """Return the file that keeps multibuffering off, which need not exist. None if there is no folder for it."""
    return cache_dir("npu-multibuffer-off.json")


def versions() -> dict[str, str]:
    """Return the versions on which the compiled kernels depend. A file of other versions does not count."""
    return {"triton-ascend": installed_version("triton-ascend") or "", "compiler": compiler_version()}


@lru_cache(maxsize=1)
def kept_off() -> str | None:
    """Return the case for which an earlier check switched multibuffering off, or None. Read once per process."""
    file = path()
    try:
        kept = json.loads(file.read_text(encoding="utf-8")) if file else {}
        return str(kept["because"]) if kept["versions"] == versions() else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def keep_off(because: str) -> Path | None:
    """Write the file, for all later processes. Return its path, or None if it cannot be written."""
    file = path()
    if file is None:
        return None
    temporary = file.with_suffix(f".{os.getpid()}.tmp")  # another process may read the file meanwhile
    content = json.dumps({"because": because, "versions": versions()}, indent=1) + "\n"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(content, encoding="utf-8")
            temporary.replace(file)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
    except OSError:
        return None
    kept_off.cache_clear()
    return file


def may_try_without() -> bool:
    """Return whether a case that fails may be tried without: neither the user nor an earlier check has decided."""
    return not os.environ.get(VARIABLE) and kept_off() is None


def state() -> str | None:
    """Return that kernels are compiled without multibuffering, and why, in one line. None if they are with it."""
    if is_on():
        return None
    if os.environ.get(VARIABLE):
        return f"without multibuffering ({VARIABLE}=0)"
    return f"without multibuffering, kept in {path()} because of: {kept_off()}"


def is_on() -> bool:
    """Return whether kernels are compiled with multibuffering. Every call reads the variable. Raises ValueError."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={value!r}: expected 0 (without multibuffering) or 1 (with it)")
    return value == "1" or (value == "" and kept_off() is None)


def options_in_use(options: dict[str, Any]) -> dict[str, Any]:
    """Return the compiler options of a launch: stable over releases, and without multibuffering where that is off."""
    options = stable_options(options)
    if options.get("multibuffer", True) and is_on():
        return options
    return {name: x for name, x in options.items() if name not in WORKSPACE_OPTIONS} | {"multibuffer": False}
