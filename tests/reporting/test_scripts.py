"""The functions of the page's scripts that need no document, run by Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from tests.tools.telemetry_runs import save_of, without_ranks, write_run

NODE = shutil.which("node")
PAGE = Path(sw.__file__).parent / "parts" / "reporting" / "page"
SCRIPTS = sorted(path.stem for path in PAGE.glob("*.js"))
SECONDS = {
    0: "0 s",
    4e-7: "0 s",
    85e-6: "85 µs",
    0.00099: "990 µs",
    0.0009996: "1 ms",
    0.012: "12 ms",
    0.0996: "0.10 s",
    1.234: "1.23 s",
    9.996: "10.0 s",
    31.24: "31.2 s",
    99.96: "100 s",
    119.4: "119 s",
    119.6: "2 min",
    192: "3 min 12 s",
    7300: "2 h 1 min",
}
SIZES = {
    0: "0 B",
    999: "999 B",
    1000: "0.98 KiB",
    1536: "1.50 KiB",
    2**20: "1.00 MiB",
    10**9: "954 MiB",
    2**40: "1.00 TiB",
    2**60: "1.00 EiB",
}
AS_LISTS = "(({width, height, x, y}) => ({width, height, x: [...x], y: [...y]}))"
pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed")


def evaluate(expression: str, given: object = None) -> Any:
    """Return the result of an expression, with all scripts but `page.js`, which draws the page."""
    scripts = [
        (PAGE / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS if name != "page"
    ]
    program = "\n".join(
        [
            *scripts,
            f"const given = {json.dumps(given)};",
            f"(async () => JSON.stringify(await ({expression})))().then(console.log);",
        ]
    )
    assert NODE is not None
    done = subprocess.run(
        [NODE, "-"], input=program, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_syntax(name: str) -> None:
    assert NODE is not None
    subprocess.run([NODE, "--check", PAGE / f"{name}.js"], check=True, timeout=60)


def test_numbers_have_units() -> None:
    assert evaluate("given.map(formatSeconds)", [*SECONDS]) == [*SECONDS.values()]
    assert evaluate("given.map(formatBytes)", [*SIZES]) == [*SIZES.values()]


def test_columns_are_decoded_as_they_were(tmp_path: Path) -> None:
    """Durations to a 65,000th of the longest one, everything else exactly."""
    slow = {"write": {9: 4.0}}
    axes = {"pp": 2, "dp": 4, "tp": 2}
    table = save_of(16, slow=slow, axes=axes, retries={2: 5}, host="host-{}")
    write_run(tmp_path / "run", [without_ranks(table, [3, 15])])
    sw.report(tmp_path / "run").write_page(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    text = page.partition('id="data">')[2].partition("</script>")[0]
    found = evaluate(
        """decodeOperation(given.operations[0]).then((o) => ({
          rank: [...o.rank], host: [...o.host], present: [...o.present],
          coordinates: o.coordinates.map((each) => [...each]),
          stages: o.stages.map((s) =>
            [s.name, [...s.start], [...s.own], [...s.bytes], [...s.retries]]),
          name: rankName(o, 9), medians: o.stages.map((s) => s.median), lost: [...o.lost],
        }))""",
        json.loads(text),
    )
    here = [rank not in (3, 15) for rank in range(16)]
    assert found["rank"] == [*range(16)]
    assert found["host"] == [rank // 8 for rank in range(16)]
    assert found["present"] == [int(each) for each in here]
    assert found["coordinates"] == table.coordinates.tolist()  # also of missing ranks
    assert found["name"] == "rank 9 · host-1 · pp 1 · dp 0 · tp 1"
    assert np.argmax(found["lost"]) == 9
    for stage, (name, start, own, nbytes, retries) in zip(
        table.stages, found["stages"], strict=True
    ):
        assert name == stage.name
        for rank in range(16):
            if not here[rank]:
                assert {start[rank], own[rank], nbytes[rank], retries[rank]} == {None}
                continue
            real = (stage.duration[rank] - stage.waited[rank]) / 1e6
            step = stage.duration.max() / 65_000 / 1e6
            assert own[rank] == pytest.approx(real, abs=2 * step)
            assert start[rank] == pytest.approx(stage.start[rank] / 1e6, abs=1e-3)
            assert nbytes[rank] == stage.bytes[rank]
            assert retries[rank] == stage.retries[rank]


@pytest.mark.parametrize("ranks_of_host", [1, 4, 8, 20, 64])
@pytest.mark.parametrize("ranks", [1, 7, 64, 4096])
def test_hosts_are_blocks_that_do_not_overlap(ranks: int, ranks_of_host: int) -> None:
    host = [rank // ranks_of_host for rank in range(ranks)]
    found = evaluate(f"{AS_LISTS}(arrangeByHost(given))", host)
    cells = [*zip(found["x"], found["y"], strict=True)]
    assert len({*cells}) == ranks
    assert all(0 <= x < found["width"] and 0 <= y < found["height"] for x, y in cells)
    assert found["width"] * found["height"] < 4 * ranks + 64
    blocks: dict[int, list[tuple[int, int]]] = {}
    for at, cell in zip(host, cells, strict=True):
        blocks.setdefault(at, []).append(cell)
    for block in blocks.values():
        spans = [max(side) - min(side) + 1 for side in zip(*block, strict=True)]
        assert spans[0] * spans[1] < len(block) + max(spans)


@pytest.mark.parametrize(
    ("sizes", "width", "height"),
    [
        ((8, 8), 8, 8),
        ((2, 4, 8), 8, 2 * 4 + 1),  # with a gap between the two coordinates of pp
        ((16, 128, 8), 128, 16 * 8 + 15),
        ((1, 4096, 1), 64, 64),  # one long row becomes a square
        ((4,), 4, 1),
    ],
)
def test_axes_run_right_and_down(sizes: tuple[int, ...], width: int, height: int) -> None:
    n = int(np.prod(sizes))
    coordinates = np.array(np.unravel_index(np.arange(n), sizes)).tolist()
    found = evaluate(f"{AS_LISTS}(arrangeByAxes(given[0], given[1]))", [coordinates, n])
    assert (found["width"], found["height"]) == (width, height)
    assert len({*zip(found["x"], found["y"], strict=True)}) == n


def test_ranks_with_the_same_coordinates_get_their_own_cells() -> None:
    """The mesh lacks an axis, such as cp; and one rank is in no mesh."""
    coordinates = [[0, 0, 1, 1, -1], [0, 0, 0, 0, -1]]
    found = evaluate(
        "(({x, y, height}) => [[...x], [...y], height])(arrangeByAxes(given, 5))", coordinates
    )
    assert found == [[0, 0, 1, 1, -1], [0, 1, 0, 1, -1], 2]


def test_axes_are_named_by_their_direction() -> None:
    coordinates = [[0, 0, 0], [0, 1, 2], [0, 0, 0], [0, 1, 0]]
    assert evaluate("axesText(['pp', 'dp', 'cp', 'tp'], given)", coordinates) == "dp →, tp ↓"


@pytest.mark.parametrize(
    ("own", "median", "heat"),
    [(10.0, 10.0, 0), (9.0, 10.0, 0), (20.0, 10.0, 0.5), (40.0, 10.0, 1), (400.0, 10.0, 1)],
)
def test_the_heat_is_the_ratio_to_the_median(own: float, median: float, heat: float) -> None:
    stage = {"own": [own], "median": median}
    whole = {"seconds": 40}
    assert evaluate("HEAT.ratio(given[0], 0, given[1])", [stage, whole]) == pytest.approx(heat)


def test_short_stages_stay_pale() -> None:
    """Four times the median, but only 3 ms of an operation of 40 s."""
    stage = {"own": [0.004], "median": 0.001}
    assert evaluate("HEAT.ratio(given, 0, {seconds: 40})", stage) < 0.01


def test_text_on_a_colour_is_black_or_white() -> None:
    colours = ["rgb(223 233 234)", "rgb(238 148 64)", "rgb(207 47 76)", "rgb(116 16 70)"]
    assert evaluate("given.map(inkOn)", colours) == ["#000", "#000", "#fff", "#fff"]


def test_ticks_are_round_numbers() -> None:
    assert evaluate("ticks(0, 41.9, 8)") == [0, 10, 20, 30, 40]
    assert evaluate("ticks(0, 41.9, 9)") == [0, 5, 10, 15, 20, 25, 30, 35, 40]
    assert evaluate("ticks(3.1, 3.9, 4)") == pytest.approx([3.2, 3.4, 3.6, 3.8])


def test_the_map_of_a_tensor_shows_the_dimensions_that_are_cut() -> None:
    offsets = [[0, 0, 4, 4], [0, 0, 0, 0], [0, 8, 0, 8]]
    assert evaluate("mappedDimensions([8, 3, 16], given)", offsets) == [0, 2]
