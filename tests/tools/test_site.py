"""The site: both languages say the same, links lead somewhere, every block of code runs; the package's files agree."""

from __future__ import annotations

import ast
import re
import shlex
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import site_pages
from addresses import FILES, addresses
from site_pages import DOCS, ROOT
from subprocesses import run_after_torch

import diyfa

ENGLISH = site_pages.pages()
# The log is in English only, and `tests/tools/test_course.py` compares and runs the course.
BOTH = [name for name in ENGLISH if not name.startswith(("log/", "course/"))]
ROOT_PAGES = ["README.md", "README.zh-CN.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
ALL = [*ROOT_PAGES, *(f"docs/{name}" for name in [*ENGLISH, *(f"zh/{n}" for n in site_pages.pages(DOCS / "zh"))])]

# --- blocks of code ---------------------------------------------------------------------------------------------------

GUIDE, HERE, APART = "test_the_guide_runs", "here", "in a test of its own: "
MODEL, GPU = "compiled: needs the weights of a model", "compiled: needs a GPU"
# What happens to each Python block of a page, in order.
BLOCKS = {
    "index.md": [HERE],
    "guide.md": [GUIDE] * 5 + [MODEL] + [GUIDE] * 3 + [GPU + " and an NPU"] + [GUIDE],
    "masks.md": [HERE] * 4,
    "scores.md": [APART + "tools/test_docs.py::test_the_page_of_score_functions_runs"] * 4,
    "precision.md": [HERE] * 4,
    "ready.md": [GPU],
    "inference.md": [APART + "tools/test_docs.py::test_the_inference_guide_runs"] * 9,
    "distributed.md": [APART + "support/context_parallel_cases.py::run_guide"],
    "integrations.md": [APART + "integrations/test_guide.py::test_the_guide_runs"] * 6,
    "npu-fusion-attention.md": [APART + "tools/test_docs.py::test_a_block_runs_as_printed"],
    "vllm-ascend.md": ["compiled: needs vllm-ascend", HERE],
    "adding-a-backend.md": [
        APART + "tools/test_docs.py::test_the_guides_plug_in_builds_and_runs_as_printed",
        APART + "tools/test_docs.py::test_a_block_runs_as_printed",
    ],
}
# What the guide's blocks take for granted, by the number of the block that needs it.
GIVEN = {
    0: "import torch, diyfa\nq, k, v = (torch.randn(2, 4, 32, 16) for _ in range(3))",
    1: "q, k, v = (torch.randn(2023, 2, 16) for _ in range(3))",
    2: "q, k, v = (torch.randn(2, 4, 32, 16) for _ in range(3))\n"
    "seed, offset, batch, heads, seqlen_q, seqlen_k = 3, 5, 2, 4, 32, 32",
    8: "a, b, out = torch.randn(128, 64), torch.randn(64, 128), torch.empty(128, 128)\n"
    "x, weight, bias = torch.randn(20, 64), torch.randn(32, 64), torch.randn(32)\n"
    "a8, b8 = torch.randn(32, 64).to(torch.float8_e4m3fn), torch.randn(64, 32).to(torch.float8_e4m3fn)\n"
    "sa, sb = torch.ones(32, 1), torch.ones(1, 32)",
}
SMALL = {'device="cuda"': 'device="cpu"', "warmup=10": "warmup=1", "rep=50": "rep=2", "head_dim=128": "head_dim=16",
         "[1024, 4096]": "[32]"}  # fmt: skip


def python_blocks(name: str) -> list[str]:
    return [block.text for block in site_pages.read(DOCS / name).blocks if block.language == "python"]


def test_every_python_block_is_listed() -> None:
    """And every test that the list names exists."""
    found = {name: len(python_blocks(name)) for name in ENGLISH if not name.startswith("course/")}
    assert {name: n for name, n in found.items() if n} == {name: len(how) for name, how in BLOCKS.items()}
    for how in (how for page in BLOCKS.values() for how in page if how.startswith(APART)):
        file, _, test = how.removeprefix(APART).partition("::")
        assert re.search(rf"^ *def {test}\b", (ROOT / "tests" / file).read_text(encoding="utf-8"), re.MULTILINE), how


@pytest.mark.parametrize("name", BLOCKS)
def test_every_python_block_compiles(name: str) -> None:
    """And the names of diyfa exist that it uses, also where it does not run."""
    for block in python_blocks(name):
        for node in ast.walk(compile(block, name, "exec", ast.PyCF_ONLY_AST)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "diyfa":
                assert hasattr(diyfa, node.attr), f"{name}: diyfa.{node.attr}"


@pytest.mark.parametrize("name", [name for name, how in BLOCKS.items() if HERE in how])
def test_blocks_run_here(name: str) -> None:
    names: dict[str, object] = {}
    for block, how in zip(python_blocks(name), BLOCKS[name], strict=True):
        if how == HERE:
            exec(block, names)


def test_the_guide_runs() -> None:
    """In a process of its own: it changes what `import flash_attn` means, until it restores it."""
    code = []
    for n, (block, how) in enumerate(zip(python_blocks("guide.md"), BLOCKS["guide.md"], strict=True)):
        if how == GUIDE:
            code += [GIVEN.get(n, ""), block]
    text = "\n".join(code)
    for printed, small in SMALL.items():
        text = text.replace(printed, small)
    assert "TFLOP/s" in run_after_torch(text, DIYFA_BACKEND="cpu")


COMMAND = re.compile(r"^(?:[A-Z_]+=\S+ )*(diyfa|python|torchrun|make) (.*)$")


def commands() -> list[tuple[str, str, list[str]]]:
    """Return (page, program, words) of every command line in a block of the pages."""
    found = []
    for name in ALL:
        for block in site_pages.read(ROOT / name).blocks:
            if block.language in ("sh", "bash", "text", "") and "course/" not in name:
                matches = (COMMAND.match(line) for line in block.text.splitlines())
                found += [(name, m[1], shlex.split(m[2], comments=True)) for m in matches if m]
    return found


def test_commands_exist() -> None:
    """Each command, option, script, module and target of make in a block of shell exists."""
    typer = pytest.importorskip("typer")
    from diyfa.cli.app import app

    known = typer.main.get_command(app).commands
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = commands()
    assert {"diyfa", "python", "torchrun", "make"} == {program for _, program, _ in found}
    for page, program, words in found:
        where = f"{page}: {program} {' '.join(words)}"
        if program == "diyfa":
            options = {name for option in known[words[0]].params for name in option.opts}
            given = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
            assert given <= options, where
        elif program == "make":
            assert re.search(rf"^{words[0]}:", makefile, re.MULTILINE), where
        elif words[0] == "-m" and words[1].startswith("diyfa"):
            assert (ROOT / (words[1].replace(".", "/") + ".py")).exists(), where
        else:
            scripts = [word for word in words if word.endswith(".py")]
            assert words[0] == "-m" or (scripts and all((ROOT / script).exists() for script in scripts)), where


# --- both languages ---------------------------------------------------------------------------------------------------


def test_every_page_is_there_in_both_languages() -> None:
    chinese = [name for name in site_pages.pages(DOCS / "zh") if not name.startswith("course/")]
    assert sorted(BOTH) == sorted(chinese)


def without_toctrees(page: site_pages.Page) -> list[site_pages.Block]:
    return [block for block in page.blocks if block.language != "{toctree"]


@pytest.mark.parametrize("name", BOTH)
def test_both_languages_are_in_step(name: str) -> None:
    """The same headings, blocks of code, tables and names in them."""
    english, chinese = site_pages.read(DOCS / name), site_pages.read(DOCS / "zh" / name)
    assert [level for level, _ in english.headings] == [level for level, _ in chinese.headings]
    assert without_toctrees(english) == without_toctrees(chinese)
    assert len(english.tables) == len(chinese.tables)
    for tables in zip(english.tables, chinese.tables, strict=True):
        bars = [[re.sub(r"`[^`]*`", "", row).replace(r"\|", "").count("|") for row in table] for table in tables]
        assert bars[0] == bars[1], tables[1][0]
    spans = [Counter(re.findall(r"`([^`]+)`", " ".join(page.prose.split()))) for page in (english, chinese)]
    assert set(spans[0]) == set(spans[1])


@pytest.mark.parametrize("name", BOTH)
def test_the_chinese_page_is_chinese(name: str) -> None:
    """In each paragraph that has sentences; no line breaks inside one, which a browser shows as spaces."""
    for line in site_pages.read(DOCS / "zh" / name).prose.splitlines():
        line = re.sub(r'"[^"]*"', "", line)  # messages are quoted as they are
        assert not re.search(
            r"[a-z]{3,} [a-z]{2,} [a-z]{2,} [a-z]{2,} [a-z]{2,} [a-z]{2,}", re.sub("`[^`]*`", "", line)
        )
        assert not re.search(r"[\u4e00-\u9fff][,;:](?=[\u4e00-\u9fff])", line), line


@pytest.mark.parametrize("name", ALL)
def test_links_lead_somewhere(name: str) -> None:
    page = site_pages.read(ROOT / name)
    folder = (ROOT / name).parent
    for target, anchor in site_pages.links(page):
        path = folder / target if target else ROOT / name
        assert path.exists(), f"{name} links to {target}"
        if anchor and path.suffix == ".md":
            anchors = {site_pages.slug(text) for _, text in site_pages.read(path).headings}
            assert anchor in anchors, f"{name} links to {target}#{anchor}"


@pytest.mark.parametrize("folder", ["", "zh/"])
def test_doors_lead_to_every_page(folder: str) -> None:
    """Each page is in a table of a door, and in a table of contents, which Sphinx checks."""
    doors = [f"{folder}{door}.md" for door in ("use", "learn", "extend", "api/index", *(["log/index"] * (not folder)))]
    reached = set()
    for door in doors:
        for target, _ in site_pages.links(site_pages.read(DOCS / door)):
            reached.add((DOCS / door).parent.joinpath(target).resolve())
    pages = {
        (DOCS / folder / name).resolve() for name in (BOTH if folder else ENGLISH) if not name.startswith("course/")
    }
    own = {(DOCS / door).resolve() for door in doors} | {(DOCS / folder / "index.md").resolve()}
    assert pages - own <= reached


def test_the_reference_has_every_public_name() -> None:
    text = "\n".join((DOCS / "api" / name).read_text(encoding="utf-8") for name in site_pages.pages(DOCS / "api"))
    listed = re.findall(r"^\.\. auto\w+:: (\w+)$", text, re.MULTILINE)
    assert set(diyfa.__all__) - {"__version__"} <= set(listed)
    assert not [name for name, count in Counter(listed).items() if count > 1]
    for name in site_pages.pages(DOCS / "api"):
        if name != "index.md":
            both = [(DOCS / folder / "api" / name).read_text(encoding="utf-8") for folder in ("", "zh")]
            directives = [re.findall(r"^(?:\.\.|   ):?.*", text, re.MULTILINE) for text in both]
            assert directives[0] == directives[1], name


def test_the_chinese_search_has_its_stemmer_and_words() -> None:
    """Its script names a stemmer that it has, and divides a query without spaces; this field's terms are words."""
    pytest.importorskip("sphinx")
    jieba = pytest.importorskip("jieba")
    from sphinx.search.zh import SearchChinese

    before = {name: getattr(SearchChinese, name) for name in ("language_name", "js_splitter_code")}
    path = DOCS / "conf.py"
    tags = SimpleNamespace(has=lambda name: name == "zh")
    try:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), {"tags": tags, "__file__": str(path)})
        assert SearchChinese.js_stemmer_rawcode == f"{SearchChinese.language_name.lower()}-stemmer.js"
        assert "var splitQuery =" in SearchChinese.js_splitter_code
    finally:
        for name, value in before.items():
            setattr(SearchChinese, name, value)
    assert list(jieba.cut("昇腾内核的前向")) == ["昇腾", "内核", "的", "前向"]


# --- the package ------------------------------------------------------------------------------------------------------


def test_there_is_one_version_and_one_address() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'attr = "diyfa.__version__"' in project and not re.search(r"^version = \"", project, re.MULTILINE)
    assert f"version: {diyfa.__version__}" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"## {diyfa.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    urls = addresses()
    assert urls.keys() >= {"Homepage", "Documentation", "Repository", "Changelog", "Issues"}
    for name in FILES:
        for address in re.findall(r"https://[\w./-]+", (ROOT / name).read_text(encoding="utf-8")):
            assert address.startswith((urls["Homepage"], urls["Repository"])), f"{name}: {address}"


def test_the_index_page_has_absolute_links(monkeypatch: pytest.MonkeyPatch) -> None:
    setuptools = pytest.importorskip("setuptools")
    given: dict[str, str] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **options: given.update(options))
    path = ROOT / "setup.py"
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), {"__file__": str(path), "__name__": "setup"})
    page = given["long_description"]
    targets = re.findall(r"\]\(([^)]+)\)", page)
    assert len(targets) > 10 and all(target.startswith(("https://", "#")) for target in targets)
    assert f"{addresses()['Repository']}/raw/main/docs/speed.svg" in page


def test_workflows_call_what_is_here() -> None:
    yaml = pytest.importorskip("yaml")
    folder = ROOT / ".github"
    for path in [*folder.rglob("*.yml"), ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"]:
        assert yaml.safe_load(path.read_text(encoding="utf-8")), path
    runs = "\n".join(path.read_text(encoding="utf-8") for path in (folder / "workflows").glob("*.yml"))
    assert "bash .ci/run" in runs and "make dist" in runs and "make docs" in runs
    stages = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.search(r"^stage '.*' docs$", stages, re.MULTILINE) and re.search(
        r"^stage '.*' dist$", stages, re.MULTILINE
    )


def test_no_file_of_the_site_names_a_machine() -> None:
    folders = [ROOT / ".github", DOCS / "_templates", DOCS / "_static"]
    files = [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), *(p for f in folders for p in f.rglob("*") if p.is_file())]
    for path in files:
        assert not re.search(r"(?<![\w.])/(?:work|root|home|tmp)/", path.read_text(encoding="utf-8")), path
    assert Path(DOCS / "conf.py").exists()
