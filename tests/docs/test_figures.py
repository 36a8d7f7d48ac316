"""The tables and figures of the pages are what one script makes of the results."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from benchmarks.figures import FIGURE, FIGURES, rewrite_figures
from benchmarks.goals import judge
from benchmarks.page import read_results, rewrite_pages
from tests.docs.blocks import DOCS, ROOT

RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
OF_BENCHMARKS = [DOCS / "benchmarks.md", *sorted((DOCS / "benchmarks").glob("*.md"))]
MARKED = re.compile(r"<!-- (?:figure|measured): [\w.]+ -->.*?<!-- end -->", re.S)
CODE = re.compile(r"```.*?```|`[^`]*`", re.S)
LINK = re.compile(r"\]\([^)]*\)")
WORDS = "two|three|four|five|six|seven|eight|nine|ten|half"
NUMBER = rf"(?:\d[\d,.]*|\b(?:{WORDS}))"
UNIT = r"(?:(?:s|ms|µs|seconds?|minutes?|hours?|times|[kMG]i?B(?:/s)?)\b|%|×(?! \d))"
MEASURE = re.compile(rf"{NUMBER} ?{UNIT}")

FACTS = {
    "takes ten minutes and needs no GPU": "for a reader",
    "It takes less than two minutes": "an upper bound, not a result",
    "in less than ten minutes on two cores": "an upper bound, not a result",
    "ten minutes of random failures": "how long `make test-all` injects failures",
}
"""What README says in numbers with units that no benchmark has measured, and why."""

SETTINGS = [
    "128 DTensors of 16 MB",
    "16 cores, 135 GB of host memory",
    "H100 80GB HBM3",
    "the whole state of 0.54 GB",
    "all processes together read at 200 MB/s",
    "Eight nodes send eight times the state",
    "Three processes with 268 MB each",
    "Four processes with 67 MB each",
    "tries three times within half a second",
    "The goal is 1.5 s plus twice the time",
    "writes the same 8 MiB again and again",
    "longer with 1 GB on each process",
    "### With 1 GB on each process",
    "twenty tensors of 1 kB",
    "For each 4 × of ranks",
    "the goal is 1.5 ×",
]
"""What pages of benchmarks say in numbers with units that is no result."""


def prose(page: Path) -> str:
    """What a page says outside code, targets of links, and what the script writes."""
    text = MARKED.sub("", page.read_text(encoding="utf-8"))
    return LINK.sub("]", CODE.sub("", text))


def test_pages_are_what_the_script_makes_of_the_results(tmp_path: Path) -> None:
    copies = {tmp_path / f"{number}.md": page for number, page in enumerate(PAGES)}
    for copy, page in copies.items():
        shutil.copyfile(page, copy)
    rewrite_pages(copies, RESULTS)
    for copy, page in copies.items():
        assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8"), (
            f"{page}: `python -m benchmarks.run --page` would change it"
        )


def test_wrong_figures_are_replaced(tmp_path: Path) -> None:
    text = README.read_text(encoding="utf-8")
    assert len(FIGURE.findall(text)) == 3
    page = tmp_path / "README.md"
    page.write_text(FIGURE.sub(r"\1\g<2>9 s", text), encoding="utf-8")
    assert page.read_text(encoding="utf-8") != text
    rewrite_pages([page], RESULTS)
    assert page.read_text(encoding="utf-8") == text


def test_every_figure_is_on_a_page() -> None:
    used = {found[0] for page in PAGES for found in FIGURE.findall(page.read_text("utf-8"))}
    assert used == set(FIGURES)


@pytest.mark.parametrize("name", ["unknown", "pause"])
def test_a_figure_without_a_result_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}'.*benchmarks/"):
        rewrite_figures(f"it took <!-- figure: {name} -->1 s<!-- end -->", [], {})


def test_the_readme_has_no_measured_figure_outside_of_markers() -> None:
    text = prose(README)
    for fact in FACTS:
        assert text.count(fact) == 1, fact
        text = text.replace(fact, "")
    assert MEASURE.findall(text) == []


def test_pages_of_benchmarks_date_what_no_result_has() -> None:
    """A paragraph or a table with such figures says "measured once" and the date."""
    pages = {page.name: prose(page) for page in OF_BENCHMARKS}
    for setting in SETTINGS:
        assert sum(text.count(setting) for text in pages.values()) == 1, setting
        pages = {name: text.replace(setting, "") for name, text in pages.items()}
    for name, text in pages.items():
        for paragraph in text.split("\n\n"):
            dated = re.search(r"measured once\b.*\d+ \w+ 20\d\d", paragraph)
            assert dated or not MEASURE.search(paragraph), f"{name}: {paragraph}"


def test_the_goals_of_results_are_those_of_today() -> None:
    for result in read_results(RESULTS):
        assert judge(result) == result["goals"], result["question"]
