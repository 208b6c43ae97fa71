"""The site's settings: Sphinx builds docs/ in English, and docs/zh with the tag `zh` in Chinese (`make docs`)."""

from __future__ import annotations

import os
import posixpath
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import diyfa  # noqa: E402

CHINESE = tags.has("zh")  # noqa: F821, Sphinx defines it
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
REPOSITORY = URLS["Repository"]

project = "diyfa"
author = "diyfa authors"
project_copyright = "diyfa authors"
version = release = diyfa.__version__
language = "zh_CN" if CHINESE else "en"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_*", "**/README.md"] if CHINESE else ["_*", "zh", "**/README.md"]

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = False
python_maximum_signature_line_length = 88
default_role = "code"  # docstrings have single backticks
napoleon_numpy_docstring = False

if CHINESE:
    import jieba
    from sphinx.search.zh import SearchChinese

    jieba.setLogLevel("ERROR")
    # Sphinx 9 ships the English stemmer for Chinese pages but looks for one of this name: "Chinese" ends the search.
    SearchChinese.language_name = "English"
    SearchChinese.js_splitter_code = (DOCS / "_static" / "search-zh.js").read_text(encoding="utf-8")
    for word in ("昇腾", "前向", "反向传播", "块表", "乘加"):  # not in jieba's dictionary
        jieba.add_word(word)

html_theme = "pydata_sphinx_theme"
html_title = "diyfa"
html_static_path = ["_static"]
html_css_files = ["site.css"]
templates_path = ["_templates"]
html_show_sourcelink = False
html_context = {"default_mode": "auto"}
html_baseurl = URLS["Documentation"]
html_theme_options = {
    "logo": {"text": "diyfa"},
    "icon_links": [{"name": "Repository", "url": REPOSITORY, "icon": "fa-solid fa-code-branch"}],
    "navbar_end": ["language", "theme-switcher", "navbar-icon-links"],
    "header_links_before_dropdown": 6,
    "show_toc_level": 2,
    "navigation_depth": 2,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "footer_start": ["copyright"],
    "footer_end": [],
}

# A fenced block whose first line says so has a title, as in GitHub's and MkDocs' dialects.
TITLE = re.compile(r'^```(\w+) title="([^"]+)"$', re.MULTILINE)
LINK = re.compile(r"\[([^\]]*)\]\((?![a-z]+:)([^)#\s]+)(#[^)\s]*)?\)")
BROKEN_LINE = re.compile(
    r"(?<=[\u4e00-\u9fff，。、；：！？（）“”])\n(?=[\u4e00-\u9fff（“])"
)  # it would show as a space
GLOB = re.compile(r"^([\w/-]+\*)\n", re.MULTILINE)  # of a toctree


def _links_that_leave_the_site(app, docname, source):
    """Rewrite links: to files of the repository, and from a Chinese page to an English one that has no translation."""
    folder = (DOCS / "zh" if CHINESE else DOCS) / posixpath.dirname(docname)
    site = DOCS / "zh" if CHINESE else DOCS

    def rewritten(match):
        text, target, anchor = match[1], match[2], match[3] or ""
        path = Path(os.path.normpath(folder / target))
        if not path.exists() or (path.is_relative_to(site) and path.is_file()):
            return match[0]
        if CHINESE and path.is_relative_to(DOCS) and path.suffix == ".md":
            up = "../" * (docname.count("/") + 1)
            page = path.relative_to(DOCS).with_suffix(".html").as_posix()
            return f'<a class="reference external" href="{up}{page}{anchor}">{text}</a>'
        if path.is_relative_to(DOCS) and path.is_file():
            return match[0]
        kind = "tree" if path.is_dir() else "blob"
        return f"[{text}]({REPOSITORY}/{kind}/main/{path.relative_to(ROOT).as_posix()})"

    text = TITLE.sub(r"```{code-block} \1\n:caption: \2", source[0])
    if docname == "course/index":  # which is written for GitHub, too
        text += "\n```{toctree}\n:hidden:\n:glob:\n\n0*\n```\n"
    elif docname.startswith("course/"):
        language, words = ("zh", "下载本章的笔记本") if CHINESE else ("en", "Download this chapter as a notebook")
        file = f"{'../' * (2 if CHINESE else 1)}notebooks/{language}/{posixpath.basename(docname)}.ipynb"
        text += f'\n<p><a class="reference external" href="{file}" download>{words}</a></p>\n'
    text = GLOB.sub(lambda match: match[0] if any(folder.glob(f"{match[1]}.md")) else "", text)
    parts = re.split(r"(^ *```.*?^ *```$)", text, flags=re.MULTILINE | re.DOTALL)
    prose = [LINK.sub(rewritten, part) for part in parts[::2]]
    parts[::2] = [BROKEN_LINE.sub("", part) for part in prose] if CHINESE else prose
    source[0] = "".join(parts)


def _other_language(app, pagename, templatename, context, doctree):
    """Give the template `language.html` the address of the same page in the other language."""
    depth = pagename.count("/")
    if CHINESE:
        other = DOCS / f"{pagename}.md"
        address = "../" * (depth + 1) + (f"{pagename}.html" if other.exists() else "index.html")
    else:
        other = DOCS / "zh" / f"{pagename}.md"
        address = "../" * depth + "zh/" + (f"{pagename}.html" if other.exists() else "index.html")
    context["other_language"] = {"address": address, "name": "English" if CHINESE else "中文"}


def _escape_bars(app, what, name, obj, options, lines):
    """|x| is an absolute value in docstrings, not a substitution."""
    lines[:] = [line.replace("|", r"\|") if "`" not in line else line for line in lines]


def setup(app):
    app.connect("autodoc-process-docstring", _escape_bars)
    app.connect("source-read", _links_that_leave_the_site)
    app.connect("html-page-context", _other_language)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
