"""The course in docs/course: run its chapters, refresh outputs and pictures, write notebooks.

    python tests/tools/course.py run [CHAPTER ...]    execute; rewrite the output blocks of both languages, and pictures
    python tests/tools/course.py notebooks FOLDER     one .ipynb for each chapter and language

A chapter is a Markdown file. Its ```python blocks are executed in order, in one namespace. An ```output block is what
the block before it prints. A picture that a block draws is saved under the path of the image that follows the block.
The Chinese page of a chapter has the same code with translated comments, so only the English one is executed.
"""

from __future__ import annotations

import io
import json
import os
import posixpath
import re
import subprocess
import sys
import tempfile
import tokenize
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENGLISH = ROOT / "docs" / "course"
CHINESE = ROOT / "docs" / "zh" / "course"
CHAPTERS = tuple(sorted(page.stem for page in ENGLISH.glob("0*.md")))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$\n?", re.MULTILINE | re.DOTALL)
IMAGE = re.compile(r"^!\[[^\]]*\]\(([^)]+)\)$\n?", re.MULTILINE)
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(?=[)#])")
SEPARATE = (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT)


@dataclass
class Cell:
    """A block of code, with what the page shows of its result."""

    code: str
    line: int  # of its first line in the page
    output: str = ""
    picture: str | None = None  # relative to the page


@dataclass
class Page:
    """A page as a list of texts and cells. `parts` joined as they were are the file."""

    path: Path
    parts: list[str | Cell] = field(default_factory=list)

    @property
    def cells(self) -> list[Cell]:
        return [part for part in self.parts if isinstance(part, Cell)]


def read_page(path: Path) -> Page:
    """Split a page into texts and cells; an output block becomes part of its cell."""
    text = path.read_text(encoding="utf-8")
    page = Page(path)
    start = 0
    for match in FENCE.finditer(text):
        kind, body = match.groups()
        between = text[start : match.start()]
        if kind == "python":
            page.parts += [between, Cell(body, text.count("\n", 0, match.start()) + 2)]
        elif kind == "output":
            if between.strip() or not page.cells:
                raise ValueError(f"{path}: an output block must follow a python block")
            page.cells[-1].output = body
        else:
            continue  # other blocks are text
        start = match.end()
    page.parts.append(text[start:])
    for before, after in zip(page.parts, page.parts[1:], strict=False):
        if isinstance(before, Cell) and isinstance(after, str) and (image := IMAGE.search(after)):
            before.picture = image[1]
    return page


def written(page: Page) -> str:
    """Return the page's text with the present outputs."""
    text = ""
    for part in page.parts:
        if isinstance(part, str):
            text += part
        else:
            text += f"```python\n{part.code}```\n" + (f"\n```output\n{part.output}```\n" if part.output else "")
    return text


def without_comments(code: str) -> str:
    """Return code with neither comments nor white space: equal for equal code in both languages."""
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    return re.sub(r"\s", "", "".join(" ; " if t.type in SEPARATE else t.string for t in tokens)).replace(";", "")


def digest(cells: list[Cell]) -> str:
    """Return what a picture that the last of `cells` draws has in its file, to tell whether it is of this code."""
    return sha256("".join(without_comments(cell.code) for cell in cells).encode()).hexdigest()[:16]


@dataclass
class Executed:
    """What a cell printed, and where the picture that it drew was saved."""

    output: str
    picture: str | None


def execute(page: Page, folder: Path) -> list[Executed]:
    """Run a page's cells in this process. Pictures are saved in `folder` under their names."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "diyfa", "figure.dpi": 100, "savefig.bbox": "tight"}
    namespace: dict[str, Any] = {"__name__": "__course__"}
    done: list[Executed] = []
    with tempfile.TemporaryDirectory() as temporary:
        # Triton reads the source of a kernel from its file: one file of the page's lines, without the text.
        file = Path(temporary) / f"{page.path.stem.replace('-', '_')}.py"
        lines = [""] * page.path.read_text(encoding="utf-8").count("\n")
        for cell in page.cells:
            source = cell.code.splitlines()
            lines[cell.line - 1 : cell.line - 1 + len(source)] = source
        file.write_text("\n".join(lines), encoding="utf-8")
        for n, cell in enumerate(page.cells):
            printed = io.StringIO()
            with redirect_stdout(printed):
                exec(compile("\n" * (cell.line - 1) + cell.code, str(file), "exec"), namespace)
            picture = None
            if plt.get_fignums():
                if cell.picture is None or len(plt.get_fignums()) > 1:
                    raise ValueError(f"{page.path}: no image follows the picture of the block in line {cell.line}")
                picture = posixpath.basename(cell.picture)
                description = digest(page.cells[: n + 1])
                plt.gcf().savefig(folder / picture, metadata={"Date": None, "Description": description})
                plt.close("all")
            done.append(Executed(printed.getvalue(), picture))
    return done


def execute_apart(chapter: str, folder: Path, timeout: float = 300) -> list[Executed]:
    """`execute` in a process of its own, where Triton's interpreter can be chosen."""
    command = [sys.executable, __file__, "execute", chapter, str(folder)]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # The reader's environment, not that of the tests: chapters choose the interpreter themselves.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": paths, "OMP_WAIT_POLICY": "PASSIVE"}  # not passive: slow beside other tests
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    if done.returncode:
        raise RuntimeError(f"chapter {chapter} failed:\n{done.stderr[-3000:]}")
    return [Executed(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def _run(names: list[str]) -> None:
    for chapter in names or CHAPTERS:
        done = execute_apart(chapter, ENGLISH / "pictures")
        for language in (ENGLISH, CHINESE):
            if not (language / f"{chapter}.md").exists():
                continue
            page = read_page(language / f"{chapter}.md")
            for cell, result in zip(page.cells, done, strict=True):
                cell.output = result.output
            page.path.write_text(written(page), encoding="utf-8")
        print(chapter, [row.picture for row in done if row.picture])


def repository() -> str | None:
    """The repository's address, if the package says it."""
    if sys.version_info < (3, 11):
        return None
    import tomllib

    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    return urls.get("Repository")


def notebook(page: Page) -> Any:
    """Return a page as a notebook without outputs. A cell draws its picture, so the image is left out."""
    from nbformat import v4

    base = repository()

    def absolute(match: re.Match[str]) -> str:
        path = Path(os.path.normpath(page.path.parent / match[1]))
        return f"{base}/blob/main/{path.relative_to(ROOT).as_posix()}" if base else match[1]

    cells = []
    after_picture = False
    for part in page.parts:
        if isinstance(part, Cell):
            cells.append(v4.new_code_cell(part.code.rstrip("\n")))
            after_picture = part.picture is not None
        else:
            text = IMAGE.sub("", part, count=1) if after_picture else part
            if text.strip():
                cells.append(v4.new_markdown_cell(LINK.sub(absolute, text).strip("\n")))
    for n, cell in enumerate(cells):
        cell["id"] = f"cell-{n}"  # the same in every build
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return v4.new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def write_notebooks(folder: Path) -> list[Path]:
    """Write FOLDER/en/NAME.ipynb and FOLDER/zh/NAME.ipynb for every chapter."""
    import nbformat

    files = []
    for name, pages in (("en", ENGLISH), ("zh", CHINESE)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for chapter in CHAPTERS:
            files.append(folder / name / f"{chapter}.ipynb")
            nbformat.write(notebook(read_page(pages / f"{chapter}.md")), files[-1])
    return files


if __name__ == "__main__":
    command, *arguments = sys.argv[1:] or ["help"]
    if command == "run":
        _run(arguments)
    elif command == "execute":
        results = execute(read_page(ENGLISH / f"{arguments[0]}.md"), Path(arguments[1]))
        print(json.dumps([result.__dict__ for result in results]))
    elif command == "notebooks":
        print(*write_notebooks(Path(arguments[0])), sep="\n")
    else:
        sys.exit(__doc__)
