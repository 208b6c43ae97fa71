"""The course runs as printed, in both languages, and its checks accept right answers and refuse wrong ones."""

from __future__ import annotations

import json
import re
import traceback
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("matplotlib")

import course
from course import CHAPTERS, CHINESE, ENGLISH, digest, execute_apart, read_page, without_comments, written
from course_answers import RIGHT, WRONG
from scripts import load_script

from diyfa.lab.course import check

SOLUTIONS = ENGLISH / "solutions"
LESSONS = [name for name in CHAPTERS if name[:2] != "09"]


def needs(chapter: str) -> None:
    if chapter[:2] in ("05", "07"):
        pytest.importorskip("triton")
    if chapter[:2] == "07":
        import hopper_gluon  # noqa: F401


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_chapter_runs_as_printed(chapter: str, tmp_path: Path) -> None:
    """Its assertions hold; it prints what the page shows, draws the pictures that the page has, and takes a minute."""
    needs(chapter)
    page = read_page(ENGLISH / f"{chapter}.md")
    done = execute_apart(chapter, tmp_path, timeout=180)
    for cell, result in zip(page.cells, done, strict=True):
        assert result.output == cell.output, f"line {cell.line}; `make course` writes it"
        if cell.picture is not None:
            assert result.picture == cell.picture.rsplit("/", 1)[-1], f"line {cell.line} draws nothing"
    assert written(page) == page.path.read_text(encoding="utf-8")


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_languages_are_in_step(chapter: str) -> None:
    """Equal code but for comments, equal outputs and pictures, as many headings, and the same links."""
    english, chinese = (read_page(folder / f"{chapter}.md") for folder in (ENGLISH, CHINESE))
    assert len(english.cells) == len(chinese.cells)
    for ours, theirs in zip(english.cells, chinese.cells, strict=True):
        assert without_comments(ours.code) == without_comments(theirs.code), f"lines {ours.line} and {theirs.line}"
        assert ours.output == theirs.output
        names = [cell.picture and cell.picture.rsplit("/", 1)[-1] for cell in (ours, theirs)]
        assert names[0] == names[1]
    text = [page.path.read_text(encoding="utf-8") for page in (english, chinese)]
    prose = [course.FENCE.sub("", part) for part in text]
    headings = [re.findall(r"^(#+) ", part, re.MULTILINE) for part in prose]
    assert headings[0] == headings[1]
    linked = []
    for page, part in zip((english, chinese), prose, strict=True):
        targets = re.findall(r"\]\(([^)#]+)", part)
        paths = (t if "://" in t else str((page.path.parent / t).resolve()) for t in targets)
        linked.append(sorted(path.replace("/docs/zh/", "/docs/") for path in paths))
    assert linked[0] == linked[1]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_pictures_are_of_this_code(chapter: str) -> None:
    """An SVG file has a checksum of the code that drew it."""
    page = read_page(ENGLISH / f"{chapter}.md")
    drawn = [n for n, cell in enumerate(page.cells) if cell.picture]
    assert drawn or chapter not in LESSONS
    for n in drawn:
        file = ENGLISH / str(page.cells[n].picture)
        assert digest(page.cells[: n + 1]) in file.read_text(encoding="utf-8"), f"{file}: `make course` draws it"
        assert file.stat().st_size < 120_000


def test_every_picture_is_shown() -> None:
    shown = {cell.picture for chapter in CHAPTERS for cell in read_page(ENGLISH / f"{chapter}.md").cells}
    assert {f"pictures/{file.name}" for file in (ENGLISH / "pictures").iterdir()} == shown - {None}


def solution(chapter: int, before: str = "", after: str = "", folder: Path | None = None) -> ModuleType:
    """Import a solution, changed. From a file, because Triton reads the source of a kernel."""
    file = SOLUTIONS / f"exercise_{chapter}.py"
    if folder is not None:
        source = file.read_text(encoding="utf-8")
        assert source.count(before) == 1, before
        file = folder / f"wrong_{chapter}.py"
        file.write_text(source.replace(before, after), encoding="utf-8")
    return load_script(file)


def need_interpreter(chapter: int) -> None:
    if chapter == 5:
        pytest.importorskip("triton")
        from diyfa.backends.cuda.runtime.launch import is_interpreting

        if not is_interpreting():
            pytest.skip("the exercise is for Triton's interpreter")


@pytest.mark.parametrize("chapter", range(1, 9))
def test_the_check_accepts_the_solution(chapter: int) -> None:
    need_interpreter(chapter)
    assert check(chapter, solution(chapter).solution)


def answers(of: dict[int, dict[str, tuple[str, str]]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("chapter", "name"), [(chapter, name) for chapter in of for name in of[chapter]])


@answers(RIGHT)
def test_the_check_accepts_another_right_answer(chapter: int, name: str, tmp_path: Path) -> None:
    need_interpreter(chapter)
    assert check(chapter, solution(chapter, *RIGHT[chapter][name], folder=tmp_path).solution)


# NumPy's warnings of infinite and invalid numbers are what some of the mistakes cause.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@answers(WRONG)
def test_the_check_refuses_a_wrong_answer(
    chapter: int, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says why: without a hint the learner would have to read the check."""
    need_interpreter(chapter)
    try:
        solved = check(chapter, solution(chapter, *WRONG[chapter][name], folder=tmp_path).solution)
    except (IndexError, ValueError) as error:  # of the learner's code, not of the check's
        assert traceback.extract_tb(error.__traceback__)[-1].name in solution(chapter).__dict__
        return
    assert not solved
    assert re.match(rf"Exercise {chapter} is not solved yet\. \w", capsys.readouterr().out)


def test_the_learners_own_errors_are_shown() -> None:
    def answer(x: torch.Tensor) -> torch.Tensor:
        assert x.dim() == 3
        return x

    with pytest.raises(AssertionError, match="dim"):
        check(1, answer)


@pytest.mark.parametrize("chapter", LESSONS)
def test_every_chapter_has_an_open_exercise(chapter: str) -> None:
    page = read_page(ENGLISH / f"{chapter}.md")
    number = int(chapter[:2])
    asked = [cell for cell in page.cells if re.search(rf"^check\({number}, \w+\)", cell.code, re.MULTILINE)]
    assert len(asked) == 1 and f"Exercise {number} is open" in asked[0].output
    assert (SOLUTIONS / f"exercise_{number}.py").exists()


def test_notebooks(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    files = course.write_notebooks(tmp_path)
    assert len(files) == 2 * len(CHAPTERS)
    for file in files:
        notebook = json.loads(file.read_text(encoding="utf-8"))
        nbformat.validate(nbformat.from_dict(notebook))
        pages = ENGLISH if file.parent.name == "en" else CHINESE
        code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
        assert code == [cell.code.rstrip("\n") for cell in read_page(pages / f"{file.stem}.md").cells]
        text = "".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
        assert "pictures/" not in text and "```output" not in text


@pytest.mark.parametrize("folder", [ENGLISH, CHINESE])
def test_the_index_names_every_chapter(folder: Path) -> None:
    text = (folder / "index.md").read_text(encoding="utf-8")
    assert {f"{name}.md" for name in CHAPTERS} == set(re.findall(r"\]\((0[\w-]+\.md)\)", text))
