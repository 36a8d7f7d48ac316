"""Each option of torchtitan's checkpoints: the same as with torchtitan's own manager, or an error.

`make torchtitan` installs what these tests need; without it, they are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.test_torchtitan import INTERPRETER, PROGRAMS, PROJECT

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not Path(INTERPRETER).exists(), reason="`make torchtitan` installs what this test needs"
    ),
]
Run = dict[str, Any]

MODEL_ONLY = {"last_save_model_only": True}
IN_HF = {**MODEL_ONLY, "last_save_in_hf": True}
SEED = {"create_seed_checkpoint": True}


def do(*runs: Run) -> list[Run]:
    """Do these runs in one process, and return what each did."""
    environ = {**os.environ, "PYTHONPATH": str(PROJECT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(INTERPRETER), str(PROGRAMS / "titan_manager.py")], env=environ, check=False,
        input=json.dumps(runs), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    results: list[Run] = json.loads(done.stdout.splitlines()[-1])
    return results


def of(base: Path | str, steps: int, *, dcp: bool = False, **options: Any) -> Run:
    return {"folder": str(base), "steps": steps, "dcp": dcp, "options": options}


def with_adapter(run: Run, assets: Path | str = "") -> Run:
    return {**run, "adapter": str(assets)}


def steps_in(names: list[str]) -> list[int]:
    return sorted(int(name.removeprefix("step-")) for name in names if name.startswith("step-"))


SEQUENCES: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "resume": [(5, {}), (7, {}), (8, {"async_mode": "ASYNC"})],
    "interval-0": [(2, {"interval": 0})],
    "keep-1": [(2, {"keep_latest_k": 1})],
    "disabled": [(3, {"enable": False})],
    "no-folder": [(2, {"load_step": 4})],
    "no-step": [(4, {}), (6, {"load_step": 3})],
    "negative-step": [(4, {}), (6, {"load_step": -2})],
    "earlier-step": [(6, {}), (5, {"load_step": 2}), (8, {})],
    "load-only": [(4, {}), (6, {"load_only": True}), (6, {"load_only": True, "load_step": 2})],
    "without-step": [(4, {}), (6, {"exclude_from_loading": ["train_state"]})],
    "without-optimizer": [(4, {}), (6, {"exclude_from_loading": ["optimizer", "dataloader"]})],
    "without-unknown": [(4, {}), (6, {"exclude_from_loading": ["nothing"]})],
    "without-model": [(4, {"exclude_from_loading": ["model"]})],
    "first-step": [(5, {"enable_first_step_checkpoint": True, "interval": 3})],
    "seeds": [(0, SEED), (0, SEED), (3, {}), (5, {}), (3, {"load_step": 0})],
    "load-only-seed": [(0, {**SEED, "load_only": True})],
    "no-adapter": [(4, IN_HF)],
    "no-assets": [(2, {"initial_load_in_hf": True})],
    "missing-start": [(2, {"initial_load_path": "/missing/path"})],
    "relative-start": [(2, {"initial_load_path": "relative/path"})],
    "empty-start": [(2, {"initial_load_path": ""})],
    "unknown-mode": [(2, {"async_mode": "unknown"})],
    "unknown-dtype": [(3, {**MODEL_ONLY, "export_dtype": "float64"})],
}
OPTION_IN_ERROR = {
    "no-folder": "checkpoint.load_step=4",
    "no-step": "checkpoint.load_step=3",
    "negative-step": "load_step=-2",
    "without-unknown": "checkpoint.exclude_from_loading=['nothing']",
    "no-adapter": "checkpoint.last_save_in_hf",
    "no-assets": "checkpoint.initial_load_in_hf",
    "missing-start": "checkpoint.initial_load_path",
    "unknown-mode": "async_mode='unknown'",
    "unknown-dtype": "export_dtype='float64'",
}


def test_options_do_what_torchtitan_does(tmp_path: Path) -> None:
    runs = [
        (name, of(tmp_path / kind / name, steps, dcp=kind == "dcp", **options))
        for kind in ("dcp", "shardwise")
        for name, sequence in SEQUENCES.items()
        for steps, options in sequence
    ]
    results = do(*(run for _, run in runs))
    count = len(runs) // 2
    for (name, run), theirs, ours in zip(runs, results[:count], results[count:], strict=False):
        where = f"{name} {run['options']}: {theirs} {ours}"
        assert ("error" in theirs) == ("error" in ours), where
        if "error" in theirs:
            assert OPTION_IN_ERROR.get(name, "") in ours["error"], where
        else:
            assert steps_in(theirs.pop("files")) == steps_in(ours.pop("files")), where
            assert theirs == ours, where


def test_the_last_model_replaces_one_of_any_format(tmp_path: Path) -> None:
    back = {"load_step": 2, **MODEL_ONLY}
    kinds = [{}, {"last_save_in_hf": True}, {"last_save_in_hf": True}, {}, {}]
    runs = [with_adapter(of(tmp_path, 4, **IN_HF))]
    runs += [with_adapter(of(tmp_path, 4, **back, **kind)) for kind in kinds]
    runs += [with_adapter(of(tmp_path, 4, **back, last_save_in_hf=True))]
    results = do(*runs)
    for each in results:
        assert each.get("error") is None
        assert each["files"] == ["model-step-4", "step-00000002"]
    place = tmp_path / "checkpoint" / "model-step-4"
    assert [path.name for path in place.iterdir()] == ["model.safetensors"]
    ends = do(
        with_adapter(of(tmp_path / "a", 0, initial_load_in_hf=True, initial_load_path=str(place))),
        with_adapter(of(tmp_path / "b", 0, initial_load_in_hf=True), place),
        of(tmp_path / "c", 4, initial_load_path=str(place)),
        of(tmp_path / "d", 4, initial_load_path=str(place), initial_load_model_only=False),
    )
    assert ends[0]["start"] == ends[1]["start"] == results[-1]["end"]
    assert all("checkpoint.initial_load_path: the run" in each["error"] for each in ends[2:])


def test_a_run_of_dcp_goes_on_from_each_kind_of_checkpoint(tmp_path: Path) -> None:
    whole, seed, full_seed, model, both = (tmp_path / name for name in "abcde")
    results = do(
        of(whole, 6, dcp=True),
        of(whole, 6, load_step=4),
        of(whole, 9, load_step=3),
        of(seed, 0, dcp=True, **SEED, **MODEL_ONLY),
        of(seed, 6, load_step=0, load_only=True),
        of(seed, 6),
        of(full_seed, 0, dcp=True, **SEED),
        of(full_seed, 6),
        of(model, 6, dcp=True, **MODEL_ONLY),
        of(model, 6),
        of(model, 6, load_step=4),
        of(both, 4),
        of(both, 8, dcp=True),
        of(both, 8, load_step=8),
    )
    end = results[0]["end"]
    assert results[1] | {"files": 0} == {
        **results[0], "loaded": True, "step": 4, "batches": 4, "saved": [6], "files": 0,
        "start": results[1]["start"],
    }  # fmt: skip
    assert "checkpoint.load_step=3" in results[2]["error"]
    for run in (results[4], results[5], results[7], results[10]):
        assert (run["loaded"], run["end"]) == (True, end)
    assert results[7]["step"] == 0
    assert "step-6 has only a model: to continue a run, load an earlier" in results[9]["error"]
    assert (results[13]["step"], results[13]["start"]) == (8, results[12]["end"])


def test_pipeline_stages_are_regrouped(tmp_path: Path) -> None:
    back = {"load_step": 4, "load_only": True}
    two, one, four = ([[0, 1], [2, 3]], [[0, 1, 2, 3]], [[0], [1], [2], [3]])
    first, *others = do(
        {**of(tmp_path, 6), "stages": two},
        *({**of(tmp_path, 6, **back), "stages": stages} for stages in (two, one, four)),
    )
    assert [each["step"] for each in others] == [4, 4, 4]
    assert all(each["end"] == first["end"] for each in others)


def test_folders_are_urls(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    results = do(
        of("unused", 4, folder=f"{url}/whole"),
        of("unused", 6, folder=f"{url}/whole"),
        with_adapter(of(f"{url}/base", 4, **MODEL_ONLY)),
    )
    assert not any("error" in each for each in results)
    assert results[1]["step"] == 4
    found = [str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("manifest.json")]
    assert sorted(found) == [
        "base/checkpoint/model-step-4",
        "base/checkpoint/step-00000002",
        *(f"whole/step-0000000{step}" for step in (2, 4, 6)),
    ]
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("base", "whole")] == []
