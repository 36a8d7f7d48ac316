"""`shardwise diff`."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.cli.conftest import Run
from tests.cli.states import Model


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "a", tmp_path / "b"


def test_a_checkpoint_is_the_same_as_itself(run: Run, root: Path) -> None:
    step = root / "step-00000100"
    ran = run("diff", step, step)
    assert ran.out.startswith("✓ the same; ")
    assert ran.status == 0
    document = run("diff", step, step, "--json").document
    assert document["same"] is True
    assert document["tensors_compared"] == len(sw.open(step).tensors())


def test_other_sharding_is_no_difference(run: Run, sharded: Path, tmp_path: Path) -> None:
    saved = sw.open(sharded)
    whole = {name: tensor[...] for name, tensor in saved.tensors().items()}
    sw.save(tmp_path / "whole", {**whole, "seed": sw.PerRank(0)}, step=7)
    document = run("diff", sharded, tmp_path / "whole", "--json").document
    assert document["tensors"] == document["shapes"] == document["only_in_a"] == []
    assert document["values"] == [{"name": "seed", "a": [0, 1, 2, 3], "b": [0]}]


def test_everything_that_differs_is_told(run: Run, pair: tuple[Path, Path]) -> None:
    same = {"same": torch.ones(5), "name": "x"}
    line = torch.arange(10.0)
    moved = line.clone()
    moved[3] += 0.5
    moved[7] -= 2
    kept = {"lr": 0.1, "betas": (0.9, 0.95), "old": 1}
    sw.save(
        pair[0],
        {
            **same,
            "line": line,
            "gone": torch.ones(1),
            "dtype": torch.ones(4),
            "shape": torch.ones(2, 3),
            "kind": torch.ones(1),
            "sched": {"config": [kept]},
        },
    )
    sw.save(
        pair[1],
        {
            **same,
            "line": moved,
            "new": "value",
            "dtype": torch.ones(4, dtype=torch.bfloat16),
            "shape": torch.ones(3, 2),
            "kind": 1,
            "sched": {"config": [{**kept, "betas": (0.9, 0.99)}]},
        },
    )
    ran = run("diff", *pair, "--json")
    assert ran.status == 1
    assert ran.document == {
        "a": str(pair[0]),
        "b": str(pair[1]),
        "same": False,
        "tensors_compared": 2,
        "only_in_a": ["gone"],
        "only_in_b": ["new"],
        "kinds": [{"name": "kind", "a": "tensor", "b": "value"}],
        "dtypes": [{"name": "dtype", "a": "float32", "b": "bfloat16"}],
        "shapes": [{"name": "shape", "a": [2, 3], "b": [3, 2]}],
        "values": [{"name": "sched.config.0.betas.1", "a": 0.95, "b": 0.99}],
        "tensors": [{"name": "line", "elements": 10, "differing": 2, "max_abs_difference": 2.0}],
    }
    out = run("diff", *pair).out
    for said in ("0.95  →  0.99", "float32  →  bfloat16", "[2, 3]  →  [3, 2]", "2 of 10 elements"):
        assert said in out
    assert "7 differences; 2 tensors compared" in out


def test_keys_of_values_in_one_only_are_names_in_one_only(
    run: Run, pair: tuple[Path, Path]
) -> None:
    sw.save(pair[0], {"config": [{"lr": 1, "old": 2}]})
    sw.save(pair[1], {"config": [{"lr": 1, "new": 3}]})
    document = run("diff", *pair, "--json").document
    assert document["only_in_a"] == ["config.0.old"]
    assert document["only_in_b"] == ["config.0.new"]


def test_values_of_each_rank_are_compared(run: Run, pair: tuple[Path, Path]) -> None:
    sw.save(pair[0], {"own": sw.PerRank({"seed": 1})})
    sw.save(pair[1], {"own": sw.PerRank({"seed": 2})})
    document = run("diff", *pair, "--json").document
    assert document["values"] == [{"name": "own.0.seed", "a": 1, "b": 2}]


@pytest.mark.parametrize(
    ("dtype", "a", "b", "differing", "largest"),
    [
        (torch.float32, [1.0, 2.0, 3.0], [1.0, 4.0, 2.5], 2, 2.0),
        (torch.float32, [math.nan, 1.0], [math.nan, 1.0], 0, None),
        (torch.float32, [math.nan, 1.0], [1.0, 1.0], 1, None),
        (torch.float32, [math.inf, 0.0], [-math.inf, 0.0], 1, None),
        (torch.float32, [0.0, 1.0], [-0.0, 1.0], 1, 0.0),
        (torch.bfloat16, [1.0, 2.0], [1.0, 2.5], 1, 0.5),
        (torch.float8_e4m3fn, [1.0, 2.0], [1.0, 4.0], 1, 2.0),
        (torch.int64, [1, 2], [-5, 2], 1, 6.0),
        (torch.uint8, [0, 255], [255, 255], 1, 255.0),
        (torch.bool, [True, False], [False, False], 1, 1.0),
        (torch.complex64, [3 + 4j, 0], [0, 0], 1, 5.0),
        (torch.float64, [1.0, 1e-300], [1.0, 0.0], 1, 1e-300),
    ],
)
def test_differences_are_counted_in_elements(
    run: Run,
    pair: tuple[Path, Path],
    dtype: torch.dtype,
    a: list[float],
    b: list[float],
    differing: int,
    largest: float | None,
) -> None:
    for place, values in zip(pair, (a, b), strict=True):
        sw.save(place, {"x": torch.tensor(values, dtype=dtype)})
    tensors = run("diff", *pair, "--json").document["tensors"]
    expected = {"elements": len(a), "differing": differing, "max_abs_difference": largest}
    assert tensors == ([{"name": "x", **expected}] if differing else [])


def test_large_tensors_are_compared_in_parts(
    run: Run, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.parts.checks.compare.MAX_BATCH_BYTES", 64)
    monkeypatch.setattr("shardwise.parts.checks.compare.MAX_CONVERTED_ELEMENTS", 3)
    x = torch.arange(5 * 7 * 6, dtype=torch.float32).reshape(5, 7, 6)
    y = x.clone()
    y[::2, 1:, 3:] += torch.arange(1.0, 4.0)
    sw.save(pair[0], {"x": x, "scalar": torch.tensor(1), "empty": torch.ones(0, 9)})
    sw.save(pair[1], {"x": y, "scalar": torch.tensor(2), "empty": torch.ones(0, 9)})
    assert run("diff", *pair, "--json").document["tensors"] == [
        {"name": "x", "elements": 210, "differing": 3 * 6 * 3, "max_abs_difference": 3.0},
        {"name": "scalar", "elements": 1, "differing": 1, "max_abs_difference": 1.0},
    ]
    assert "its only element, by 1" in run("diff", *pair).out
    sw.save(pair[1], {"x": x + 1}, overwrite=True)
    assert "all 210 elements, by at most 1" in run("diff", *pair).out


def test_tied_tensors_differ_together(run: Run, pair: tuple[Path, Path]) -> None:
    torch.manual_seed(0)
    model = Model()
    sw.save(pair[0], {"model": model})
    with torch.no_grad():
        model.embed.weight[0, 0] += 1
    sw.save(pair[1], {"model": model})
    tensors = run("diff", *pair, "--json").document["tensors"]
    assert [each["name"] for each in tensors] == ["model.embed.weight", "model.head.weight"]
    assert tensors[0]["differing"] == tensors[1]["differing"] == 1


def test_long_lists_are_cut_for_people(run: Run, pair: tuple[Path, Path]) -> None:
    sw.save(pair[0], {f"v{i:02}": 0 for i in range(30)})
    sw.save(pair[1], {f"v{i:02}": 1 for i in range(30)})
    cut = run("diff", *pair).out
    assert "v19" in cut
    assert "v20" not in cut
    assert "10 more: --all lists them" in cut
    assert "v29" in run("diff", *pair, "--all").out


def test_damage_is_no_difference(run: Run, root: Path) -> None:
    step = root / "step-00000100"
    path = next(step.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[sw.open(step).layout.files[0].entry.data_at] ^= 1
    path.write_bytes(data)
    ran = run("diff", step, root / "step-00000200", "--json")
    assert "differ from those that were saved" in ran.err
    assert (ran.out, ran.status) == ("", 1)
