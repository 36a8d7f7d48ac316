"""The page as a file: complete, without network, safe for hostile texts, and small."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.testing.thread_group import ThreadGroup, run_ranks
from tests.tools.telemetry_runs import (
    RESTORE,
    report_of,
    save_of,
    save_with_one_stage,
    telemetry_of,
    write_run,
)

HOSTILE = "</script><script>hacked = 1</script><img src=x onerror='hacked = 2'>"


class Page(HTMLParser):
    """The elements of a page, and its texts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.html = path.read_text(encoding="utf-8")
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def data(self) -> Any:
        (text,) = (each for each in self.texts if each.startswith('{"operations"'))
        return json.loads(text)


def page_of(root: Path, *tensors: str) -> Page:
    path = root.parent / "report.html"
    size = sw.report(root, tensors=tensors).write_page(path)
    assert size == path.stat().st_size
    return Page(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    slow = {"write": dict.fromkeys(range(8, 16), 3.0)}
    saves = [save_of(16, step=100), save_of(16, step=200, slow=slow, started="2026-11-28")]
    write_run(tmp_path / "run", saves)
    return tmp_path / "run"


def test_the_page_needs_no_network(root: Path) -> None:
    page = page_of(root)
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"link", "img", "iframe", "object", "embed", "base"}
    for tag, attributes in page.elements:
        assert "src" not in attributes, tag
        assert attributes.get("href", "#").startswith("#"), tag
        assert not any(name.startswith("on") for name in attributes), tag
    assert "url(" not in page.html
    assert "@import" not in page.html


def test_only_our_script_may_run(root: Path) -> None:
    page = page_of(root)
    (policy,) = (
        attributes["content"] or ""
        for tag, attributes in page.elements
        if tag == "meta" and "http-equiv" in attributes
    )
    assert policy.startswith("default-src 'none'")
    script = max(page.texts, key=lambda text: "async function start()" in text)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy


def test_what_needs_no_script_is_in_the_page(root: Path) -> None:
    text = " ".join(page_of(root).texts)
    assert "Step 200 was saved in" in text
    assert "node-0001 (ranks 8…15)" in text
    assert re.search(r"slower than step 100, which took 9\.\d+ s", text)
    assert "best of the run" in text
    assert "seconds of each save" in text


@pytest.mark.parametrize("field", ["path", "library", "stage", "phase", "axis", "operation"])
def test_hostile_texts_are_escaped(root: Path, field: str) -> None:
    harmless = page_of(root)
    file = telemetry_of(root / "step-00000200")
    document = json.loads(gzip.decompress(file.read_bytes()))
    if field == "stage":
        document["stages"][2]["name"] = HOSTILE
    elif field == "phase":
        document["phases"] = {HOSTILE: 3.0}
        document["operation"] = "restore"
    elif field == "axis":
        document |= {"axes": [HOSTILE], "coordinates": [[*range(16)]]}
    else:
        document[field] = HOSTILE
    file.write_bytes(gzip.compress(json.dumps(document).encode()))
    page = page_of(root)
    assert "hacked" in page.html
    scripts = [attributes for tag, attributes in page.elements if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "data"}, {}]
    for tag, attributes in page.elements:
        assert tag != "img"
        assert not any(name.startswith("on") for name in attributes)
    assert page.data["operations"]
    tags = {tag for tag, _ in page.elements}
    assert tags <= {tag for tag, _ in harmless.elements} | {"ul", "li"}


def test_a_hostile_host_is_refused_as_damage(root: Path) -> None:
    file = telemetry_of(root / "step-00000200")
    document = json.loads(gzip.decompress(file.read_bytes()))
    document["hosts"][0] = HOSTILE
    file.write_bytes(gzip.compress(json.dumps(document).encode()))
    page = page_of(root)
    assert "hacked" not in page.html
    assert f"{file}: the telemetry is damaged" in " ".join(page.texts)


def test_a_hostile_name_of_a_tensor_and_of_a_directory(tmp_path: Path) -> None:
    name = HOSTILE.replace("/", "-")
    sw.save(tmp_path / name / "step-00000001", {"model": {HOSTILE: torch.zeros(3)}}, step=1)
    path = tmp_path / "report.html"
    sw.report(tmp_path / name).write_page(path)
    page = Page(path)
    assert [tensor["name"] for tensor in page.data["tensors"]] == [f"model.{HOSTILE}"]
    assert "img" not in {tag for tag, _ in page.elements}
    assert len([tag for tag, _ in page.elements if tag == "script"]) == 2


def test_other_pages_than_ours_can_be_without_operations(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [save_of(4)])
    telemetry_of(tmp_path / "run" / "step-00000100").unlink()
    page = page_of(tmp_path / "run")
    assert page.data["operations"] == []
    assert "no readable telemetry for 1 of 1 checkpoint" in " ".join(page.texts)
    assert [tensor["name"] for tensor in page.data["tensors"]] == ["model.w"]


def test_rates_are_compared_with_the_best_of_this_and_earlier_saves(tmp_path: Path) -> None:
    saves = [
        save_of(2, step=step, seconds={"write": seconds}, noise=0, started=f"2026-11-{step}")
        for step, seconds in ((11, 4.0), (12, 8.0), (13, 2.0))
    ]
    write_run(tmp_path / "run", saves)
    html = page_of(tmp_path / "run" / "step-00000012").html
    best = re.search(r"best of the run</dt><dd>(.*?)</dd>", html)
    assert best is not None
    assert best.group(1) == "1.00 GiB/s"


def test_the_median_rate_of_two_ranks_is_that_of_the_median_time(tmp_path: Path) -> None:
    report_of(tmp_path, save_with_one_stage([4.0, 16.0], total=16.0)).write_page(tmp_path / "page")
    page = (tmp_path / "page").read_text(encoding="utf-8")
    assert 'data-label="median">4.00 s<' in page
    rates = re.findall(r"<dt>(slowest|median)</dt><dd>([^<]+)</dd>", page)
    assert rates == [("slowest", "256 MiB/s"), ("median", "1.00 GiB/s")]


def test_few_operations_of_very_many_ranks_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for three saves of 16 ranks with four stages."""
    monkeypatch.setattr("shardwise.parts.reporting.report.MOST_CELLS", 3 * 3 * 16 * 4)
    saves = [save_of(16, step=step, started=f"2026-11-{step}") for step in range(11, 17)]
    write_run(tmp_path / "run", saves)
    shown = page_of(tmp_path / "run").data["operations"]
    assert len(shown) == 3
    assert shown[0]["step"] == 16


def test_the_phases_of_a_recovery_add_up(tmp_path: Path) -> None:
    restore = save_of(
        2, step=11, seconds=RESTORE, noise=0, operation="restore", phases={"reading": 2.0}
    )
    write_run(tmp_path / "run", [save_of(2, step=11)], [restore])
    html = page_of(tmp_path / "run").html
    assert re.findall(r"</i>(\w+) (\d\.\d)\d s</li>", html) == [
        ("reading", "2.0"),
        ("other", "3.8"),
    ]


def test_the_charts_show_the_newest_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.parts.reporting.sections.MOST_BARS", 2)
    saves = [save_of(2, step=step, started=f"2026-11-{step}") for step in (11, 12, 13)]
    write_run(tmp_path / "run", saves)
    html = page_of(tmp_path / "run").html
    assert html.count("<span>step 12</span><span>13</span>") == 2  # seconds, and sizes


def test_a_page_of_16384_ranks_has_at_most_5_mb(tmp_path: Path) -> None:
    stages = {f"stage {k}": 1.0 + k for k in range(8)} | {"write": 12.0}
    axes = {"pp": 16, "dp": 128, "tp": 8}
    saves = [
        save_of(16_384, step=k, seconds=stages, axes=axes, seed=k, started=f"2026-11-{k:02d}")
        for k in range(1, 6)
    ]
    write_run(tmp_path / "run", saves)
    page = page_of(tmp_path / "run")
    assert len(page.html.encode()) <= 5e6
    assert len(page.data["operations"]) >= 2


@pytest.mark.parametrize("world", [2**20, 5])
def test_a_record_of_one_rank_of_many(tmp_path: Path, world: int) -> None:
    """The page does not get a row for each of a million ranks of which nothing is known."""
    table = save_of(1)
    write_run(tmp_path / "run", [replace(table, world_size=world)])
    page = page_of(tmp_path / "run")
    assert len(page.html) < 200_000
    (operation,) = page.data["operations"]
    assert operation["world"] == world


def test_the_map_of_a_tensor_has_the_boxes_of_all_ranks(sharded_places: Path) -> None:
    page = page_of(sharded_places, "model.rows")
    (tensor,) = page.data["tensors"]
    assert (tensor["name"], tensor["shape"], tensor["boxes"]) == ("model.rows", [8, 6], 4)
    assert (tensor["kind"], tensor["owners"]) == ("rank", [0, 1, 2, 3])
    assert all(re.fullmatch(r"r0000\d-\w+\.safetensors", name) for name in tensor["files"])


@pytest.mark.long
def test_of_very_many_boxes_some_are_kept(tmp_path: Path) -> None:
    rows = 40_000
    boxes = [
        (sw.Box((row, 0), (1, 1 + row % 2)), torch.zeros(1, 1 + row % 2)) for row in range(rows)
    ]
    boxes += [(sw.Box((row, 1), (1, 1)), torch.zeros(1, 1)) for row in range(0, rows, 2)]
    sw.save(tmp_path / "one", {"model": {"w": sw.Shards((rows, 2), torch.float32, boxes)}})
    page = page_of(tmp_path / "one")
    (tensor,) = page.data["tensors"]
    assert tensor["boxes"] == 60_000
    assert tensor["shown"] == 15_000
    assert len(page.html) < 400_000


@pytest.fixture
def sharded_places(tmp_path: Path) -> Path:
    """A checkpoint of four ranks, which hold rows of a tensor."""

    def save(group: ThreadGroup) -> None:
        box = sw.Box((2 * group.rank, 0), (2, 6))
        rows = sw.Shards((8, 6), torch.float32, [(box, torch.zeros(2, 6))])
        sw.save(tmp_path / "sharded", {"model": {"rows": rows}}, group=group)

    run_ranks(4, save)
    return tmp_path / "sharded"
