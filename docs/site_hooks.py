"""Hooks of MkDocs: pages from outside docs/, pictures for both themes, and code in docstrings.

The pages link to each other as files of the repository, so that links also work in an editor. This
module maps these links to pages of the site.
"""

from __future__ import annotations

import ast
import json
import os
import posixpath
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from html import escape
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()([^)#\s]+)")
PICTURE = re.compile(r'<img alt="([^"]*)" src="([^"]+)\.svg" ?/?>')
TABLE = re.compile(r"<table>.*?</table>", re.S)
HEADER = re.compile(r"<th[^>]*>(.*?)</th>", re.S)
ROW = re.compile(r"<tr>.*?</tr>", re.S)
DARK = re.compile(r"@media \(prefers-color-scheme: dark\) \{\n(.*?)^\}\n", re.S | re.M)
ALWAYS = ("CONTRIBUTING.md", "CHANGELOG.md", "examples/notebook.ipynb")


def page_of(path: str) -> str:
    """Return the page of the site that shows a file of the repository.

    Args:
        path: the path of the file, relative to the root of the repository.
    """
    if path == "README.md":
        return "index.md"
    path = path.removeprefix("docs/")
    return posixpath.splitext(path)[0] + ".md" if path.endswith((".py", ".ipynb")) else path


def map_links(markdown: str, source: str) -> str:
    """Replace links to files of the repository with links to pages of the site.

    Args:
        markdown: the text of the page.
        source: the path of the file that has the text, relative to the root of the repository.
    """
    here = posixpath.dirname(source)
    page = posixpath.dirname(page_of(source))

    def map_link(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, link[1]))
        if "://" in link[1] or not (ROOT / target).is_file():
            return link[1]
        return posixpath.relpath(page_of(target), page or ".")

    return LINK.sub(map_link, markdown)


def linked_files() -> set[str]:
    """Return the files outside docs/ that pages link to, relative to the root of the repository."""
    found = set(ALWAYS)
    for path in (ROOT / "docs").rglob("*.md"):
        for link in LINK.findall(path.read_text(encoding="utf-8")):
            target = posixpath.normpath(
                posixpath.join(path.parent.relative_to(ROOT).as_posix(), link)
            )
            if not target.startswith("docs/") and (ROOT / target).is_file():
                found.add(target)
    return found - {"README.md"}


def text_of(path: str) -> str:
    """Return a file of the repository as Markdown: a page, a program, or a notebook."""
    content = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".py"):
        return f"# {path}\n\n````python\n{content}````\n"
    if path.endswith(".ipynb"):
        return "\n\n".join(cells_of(json.loads(content)))
    return map_links(content, path)


def cells_of(notebook: dict[str, Any]) -> Iterator[str]:
    """Yield the cells of a notebook as Markdown, each code cell with what it shows.

    The code runs in a new directory, which is removed.
    """
    names: dict[str, Any] = {}
    before = Path.cwd()
    with TemporaryDirectory() as directory:
        os.chdir(directory)
        try:
            for cell in notebook["cells"]:
                source = "".join(cell["source"])
                if cell["cell_type"] == "markdown":
                    yield source
                else:
                    yield f"```python\n{source}\n```"
                    yield run_cell(source, names)
        finally:
            os.chdir(before)


def run_cell(source: str, names: dict[str, Any]) -> str:
    """Run a cell; return what it prints and the value of its last expression, as HTML."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    printed = StringIO()
    value = None
    with redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "notebook", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "notebook", "eval"), names)
    text = f"<pre>{escape(printed.getvalue())}</pre>" if printed.getvalue() else ""
    return f'<div class="output">{text}{show(value)}</div>' if text or value is not None else ""


def show(value: Any) -> str:
    """Return the text of a value as HTML."""
    return "" if value is None else f"<pre>{escape(repr(value))}</pre>"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace patterns in the navigation with the pages that are not listed otherwise."""
    listed = set(re.findall(r"[\w/-]+\.md", str(config.nav)))
    for section in config.nav or []:
        for title, pages in section.items():
            if isinstance(pages, list):
                section[title] = [each for page in pages for each in expand(page, listed)]
    return config


def expand(page: Any, listed: set[str]) -> list[Any]:
    """Return the unlisted pages that a pattern matches; return any other entry as it is."""
    if not isinstance(page, str) or "*" not in page:
        return [page]
    docs = ROOT / "docs"
    found = sorted(path.relative_to(docs).as_posix() for path in docs.glob(page))
    return [path for path in found if path not in listed]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ that pages link to, and two variants of each picture."""
    for path in sorted(linked_files()):
        files.append(File.generated(config, page_of(path), content=text_of(path)))
    for picture in sorted((ROOT / "docs" / "images").glob("*.svg")):
        drawing = picture.read_text(encoding="utf-8")
        for theme, replacement in (("light", ""), ("dark", r"\1")):
            name = f"images/{picture.stem}.{theme}.svg"
            content = DARK.sub(replacement, drawing)
            files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Map the links of a page in docs/."""
    if page.file.generated_by:
        return markdown
    return map_links(markdown, f"docs/{page.file.src_uri}")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fit pictures to the theme and the screen, and say in each cell of a table what it is."""
    return TABLE.sub(label_cells, PICTURE.sub(variants_of, html))


def variants_of(picture: re.Match[str]) -> str:
    """Return a picture for both themes, also as narrow as a phone if it is drawn for one."""
    alt, path = picture.groups()
    narrow = (ROOT / "docs" / "images" / f"{posixpath.basename(path)}.narrow.svg").exists()
    widths = {"wide": "", "narrow": ".narrow"} if narrow else {"": ""}
    return "".join(
        f'<img alt="{alt}" class="{width}" src="{path}{suffix}.{theme}.svg#only-{theme}"/>'
        for width, suffix in widths.items()
        for theme in ("light", "dark")
    )


def label_cells(table: re.Match[str]) -> str:
    """Give each cell the header of its column. Phones show it, because they stack the cells."""
    headers = [re.sub("<[^>]+>", "", each).strip() for each in HEADER.findall(table[0])]

    def label_row(row: re.Match[str]) -> str:
        labels = iter(headers)
        return re.sub("<td", lambda _: f'<td data-label="{next(labels, "")}"', row[0])

    return ROW.sub(label_row, table[0])


class ExampleBlocks(griffe.Extension):
    """Marks the code below `Example:` in docstrings as Python."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Put the indented lines below `Example:` between fences."""
        if obj.docstring is None:
            return
        obj.docstring.value = re.sub(
            r"^Example:\n\n((?: {4}.*\n|\n)+)",
            lambda match: f"**Example:**\n\n```python\n{unindent(match[1])}\n```\n\n",
            obj.docstring.value + "\n",
            flags=re.M,
        ).rstrip()


def unindent(lines: str) -> str:
    """Return lines without four leading spaces, and without blank lines at the end."""
    return re.sub(r"^ {4}", "", lines, flags=re.M).rstrip()
