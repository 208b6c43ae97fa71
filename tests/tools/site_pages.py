"""Pages of the site as text: fenced and indented blocks, tables, headings and links of a Markdown file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")


class Block(NamedTuple):
    """A block of code. `language` is the fence's first word, "" for an indented block or a fence without one."""

    language: str
    text: str


class Page(NamedTuple):
    """The parts of one page. `prose` is the page without blocks of code, `tables` its tables as lines."""

    blocks: list[Block]
    tables: list[list[str]]
    headings: list[tuple[int, str]]
    prose: str


def read(path: Path) -> Page:
    """Return the parts of a Markdown file."""
    lines = path.read_text(encoding="utf-8").split("\n")
    page, prose = Page([], [], [], ""), []
    at = 0
    while at < len(lines):
        line, end = lines[at], at + 1
        if fence := re.match(r" *(`{3,})(\{?\w*)", line):
            while not lines[end].strip().startswith(fence[1]):
                end += 1
            page.blocks.append(Block(fence[2], "\n".join(lines[at + 1 : end]) + "\n"))
            end += 1
        elif line.startswith("    ") and not lines[at - 1] and not re.match(r" +[*-] ", line):
            while lines[end : end + 1] and lines[end].startswith("    "):
                end += 1
            page.blocks.append(Block("", "\n".join(text[4:] for text in lines[at:end]) + "\n"))
        elif line.startswith("|"):
            while lines[end : end + 1] and lines[end].startswith("|"):
                end += 1
            page.tables.append(lines[at:end])
            prose += lines[at:end]
        else:
            if heading := re.match(r"(#+) (.+)", line):
                page.headings.append((len(heading[1]), heading[2]))
            prose.append(line)
        at = end
    return page._replace(prose="\n".join(prose))


def slug(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and MyST form it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\u4e00-\u9fff\- ]", "", text.strip().lower()).replace(" ", "-")


def links(page: Page) -> list[tuple[str, str]]:
    """Return the relative links of a page as (target, anchor)."""
    return [(t, (a or "")[1:]) for t, a in LINK.findall(page.prose) if "://" not in t]


def pages(folder: Path = DOCS) -> list[str]:
    """Return the names of the pages below a folder, relative to it; in `DOCS`, the English ones."""
    found = (p.relative_to(folder) for p in sorted(folder.rglob("*.md")))
    return [str(name) for name in found if folder != DOCS or name.parts[0] != "zh"]
