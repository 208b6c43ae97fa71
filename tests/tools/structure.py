"""How large the rooms of the code are, and what in them remembers: `python tests/tools/structure.py [FOLDER]`.

Of a checkout, by default this one: lines and modules of each folder of non-test code, and caches.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Everything that remembers, by what it is. Of calls, in the order in which they ask: plans, which are bounded, loaded
# binaries, of which there are as many as kinds of kernels, and tuned tiles.
CACHES = {
    "diyfa/plan.py:plans": "plan",
    "diyfa/plan.py:Plan.backward_repeats": "plan: its launches of the backward pass",
    "backends/cuda/runtime/driver.py:TensorMaps": "plan: the tensor maps of its launches",
    "diyfa/distributed/check.py:_agreed": "plan: what all ranks have called with",
    "diyfa/distributed/sharding.py:rank_segments": "plan: of a batch, which all layers share",
    "diyfa/distributed/steps.py:ring_steps": "plan: the same",
    "diyfa/distributed/ulysses.py:_row_order": "plan: the same",
    "backends/cuda/runtime/launcher.py:_binaries": "loaded binary",
    "backends/cuda/runtime/pack.py:installed": "loaded binary: the index of the pack",
    "backends/npu/runtime/tiles.py:_refused": "tuned tile: what the compiler refuses",
    "diyfa/tuning.py:Tuner._configs": "tuned tile",
    "diyfa/tuning.py:Tuner._unmeasured": "tuned tile",
}
# Not of calls: what stays true as long as the process lives, one small entry for each device or tile at most.
PROCESS_CACHES = {
    "backends/cuda/__init__.py:_arch_of_gpu": "of a device; asked in each call",
    "backends/cuda/attention/configs.py:_rows": "rows of a table that fit; asked in each new call",
    "backends/cuda/gluon/compat.py:ptxas_options": "searches ptxas",
    "backends/cuda/runtime/binaries.py:_sources": "names of the sources",
    "backends/cuda/runtime/binaries.py:source_hash": "reads the sources",
    "backends/cuda/runtime/signature.py:_arguments_by_kernel": "of a kernel: the arguments that are no constants",
    "backends/cuda/runtime/signature.py:_Arguments.indices_by_types": "of a kernel: which are tensors, by types",
    "backends/cuda/runtime/signature.py:_ArgumentIndices._known": "of such types: the kinds of arguments, by dtypes",
    "backends/cuda/runtime/signature.py:shared_box": "of each shape of a tile: equal ones are one object",
    "backends/cuda/gluon/tma.py:rows_box": "of each shape of a tile, with its layout",
    "backends/cuda/attention/launch.py:_stride_names": "of a tensor's name, by which kernels know its strides",
    "diyfa/problem.py:_kinds": "kinds of problems, with what follows from a kind alone",
    "backends/cuda/gluon/tma.py:smem_box": "of each shape of a tile, with its layout",
    "backends/cuda/runtime/pack.py:_warn": "what was said already",
    "backends/cuda/runtime/pack.py:_rejected_packs": "packs that the driver cannot load",
    "backends/cuda/runtime/launch.py:_multiprocessors": "of a device; asked in each launch",
    "backends/npu/__init__.py:device_name": "of a device; asked in each call",
    "backends/npu/runtime/compat.py:has_ascend_compiler": "searches the installed packages; asked in each call",
    "backends/npu/runtime/compat.py:interpreter_problem": "the same",
    "backends/npu/runtime/compiler.py:_check_before_compiling": "patches Triton once",
    "backends/npu/runtime/compiler.py:compiler_version": "runs the compiler",
    "backends/npu/runtime/multibuffer.py:kept_off": "reads a file, and runs the compiler if there is one",
    "backends/npu/runtime/launch.py:_core_counts": "of a device, from the driver; asked in each launch",
    "diyfa/integrations/transformers.py:_attends_by_itself": "of a model's file, which is read for it",
    "diyfa/score_functions.py:_compiled": "of a user's score function, the last 256: the program that is read from it",
    "diyfa/score_programs.py:mask_dtype": "of a jit mask function, the last 256: the dtype of what it returns",
    "diyfa/score_programs.py:programs": "of such a program, also the next six: its lines",
    "diyfa/score_programs.py:slope_program": "its derivative",
    "diyfa/score_programs.py:load_gradients": "its derivatives by the values that it loads",
    "diyfa/score_code.py:_keys_of_called": "hashes the source of the functions that such programs call",
    "diyfa/score_code.py:gathered_loads": "how many loads gather; each choice of a tile asks",
    "diyfa/score_code.py:value_source": "its source for kernels",
    "diyfa/score_code.py:slope_source": "the source of its derivative",
    "diyfa/score_code.py:gradients_source": "the source of its derivatives",
    "diyfa/score_code.py:_jit_function": "its jit function",
    "diyfa/device.py:npu_status": "tries to import torch_npu, which may take long to fail",
    "diyfa/registry.py:_plugins": "reads the metadata of all installed packages",
    "diyfa/registry.py:_loaded": "the backends",
    "diyfa/distributed/compiled.py:_calls": "what a compiled graph names by number: one for each kind of call",
}
OTHER_CACHES = {
    "backends/cuda/attention/launch.py:_forced": "the configs of `use_config`, as long as its block runs",
    "backends/cuda/runtime/passes.py:_idle_lists": "memory of repeated launches, at most RELAUNCHES",
    "backends/cuda/gluon/tile_counter.py:_counters": "device memory: eight bytes for each stream",
    "diyfa/integrations/npu_fusion_arguments.py:compressed_mask": "device memory: the 4 MiB that an operator wants",
    "diyfa/integrations/seams.py:_on": "what is switched on, until its handle is removed",
    "diyfa/testing.py:expected_results": "the oracle: every backend is compared with the same results",
    "diyfa/testing.py:yardstick_results": "the same",
    "diyfa/testing.py:_lse_unit": "the same",
}


EMPTY = ("{}", "OrderedDict()", "WeakKeyDictionary()", "set()", "deque()")


def sources(root: Path) -> dict[str, ast.Module]:
    """Path -> syntax tree, of all code that is installed."""
    files = [*(root / "diyfa").rglob("*.py"), *(root / "backends").rglob("*.py")]
    named = {f.relative_to(root).as_posix(): f for f in sorted(files)}
    link = "diyfa/backends/"  # to backends/
    return {name: ast.parse(f.read_text(), str(f)) for name, f in named.items() if not name.startswith(link)}


def caches(trees: dict[str, ast.Module]) -> list[str]:
    """Functions that remember results, kinds of dictionaries, and dictionaries of a module, or of objects outside
    tools, that begin empty."""
    found = []
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                words = [ast.unparse(each) for each in node.decorator_list]
                if any(re.match(r"(functools\.)?(lru_)?cache\b", word) for word in words):
                    found.append(f"{file}:{node.name}")
            elif isinstance(node, ast.ClassDef) and not any(tool in file for tool in ("/lab/", "/cli/")):
                fields = [each for each in ast.walk(node) if isinstance(each, ast.AnnAssign) and each.value is not None]
                empty = [each for each in fields if ast.unparse(each.value) in ("{}", "set()")]
                if any(ast.unparse(base).startswith("dict") for base in node.bases):
                    found.append(f"{file}:{node.name}")
                found += [f"{file}:{node.name}.{ast.unparse(each.target).removeprefix('self.')}" for each in empty]
        for statement in tree.body:
            if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
                empty = ast.unparse(statement.value) in EMPTY
                if empty:
                    found.append(f"{file}:{ast.unparse(getattr(statement, 'target', None) or statement.targets[0])}")
    return found


def main(root: Path) -> None:
    trees = sources(root)
    lines: dict[str, list[int]] = {}
    for file in trees:
        lines.setdefault(str(Path(file).parent), []).append((root / file).read_text().count("\n"))
    print(f"{'room':32} {'modules':>8} {'lines':>8}")
    for room, counts in lines.items():
        print(f"{room:32} {len(counts):8} {sum(counts):8}")
    for title, rooms in {"library": [x for x in lines if "/lab" not in x], "all": list(lines)}.items():
        counts = [count for room in rooms for count in lines[room]]
        print(f"{title:32} {len(counts):8} {sum(counts):8}")
    remembered = caches(trees)
    tables = {
        "caches of calls: plans, loaded binaries, tuned tiles": CACHES,
        "facts of the process that are remembered": PROCESS_CACHES,
        "what else begins empty and is filled": OTHER_CACHES,
    }
    listed = {title: [f"{x}: {table[x]}" for x in remembered if x in table] for title, table in tables.items()}
    unnamed = sorted({*remembered} - {*CACHES, *PROCESS_CACHES, *OTHER_CACHES})
    for title, names in (listed | {"caches that no table of this file names": unnamed}).items():
        print(f"\n{title}: {len(names)}")
        for name in names:
            print(f"  {name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
