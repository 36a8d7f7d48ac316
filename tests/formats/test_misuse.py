"""Wrong places, parts of checkpoints, and files that must not be overwritten: what is said."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import shardwise as sw
from tests.tools.gang import Gang, GangError


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A checkpoint of DCP."""
    state = {"model": {"w": torch.arange(6.0).reshape(2, 3)}}
    dcp.save(state, checkpoint_id=tmp_path / "step_10", no_dist=True)
    return tmp_path / "step_10"


def test_a_part_of_a_checkpoint_is_not_taken_for_one(foreign: Path) -> None:
    """Of its files each ends as one of torch.save does."""
    for name in (".metadata", "__0_0.distcp"):
        with pytest.raises(sw.CheckpointNotFoundError, match=f"part of .* open {foreign}$"):
            sw.open(foreign / name)


def test_one_that_was_never_finished_is_told(foreign: Path) -> None:
    (foreign / ".metadata").unlink()
    with pytest.raises(sw.CheckpointNotFoundError, match="never finished"):
        sw.open(foreign)


def test_what_is_below_is_what_was_meant(foreign: Path, tmp_path: Path) -> None:
    shutil.copytree(foreign, tmp_path / "step_20")
    (tmp_path / "logs.txt").touch()
    with pytest.raises(
        sw.CheckpointNotFoundError, match=r"Open a checkpoint below: step_10, step_20(\.|$)"
    ):
        sw.open(tmp_path)


PACKAGED = [
    ".snapshot_metadata",
    "model_optim_rng.pt",
    "iter_0000005/mp_rank_00/model_optim_rng.pt",
]
"""Files of formats that the package shardwise-legacy reads."""


@pytest.mark.parametrize("file", PACKAGED)
@pytest.mark.parametrize("switch", ["off", "another-package"])
def test_a_format_of_a_package_that_is_missing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: str, file: str
) -> None:
    """It is not read, and nothing is saved beside it."""
    monkeypatch.setenv("SHARDWISE_PLUGINS", switch)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_bytes(b"{}")
    with pytest.raises(
        sw.FormatError,
        match=r"reads: in a clone of shardwise, run pip install -e packages/shardwise-legacy; or",
    ):
        sw.open(tmp_path)
    state = {"w": torch.ones(2)}
    with pytest.raises(sw.CheckpointExistsError):
        sw.save(tmp_path, state)
    with pytest.raises(sw.CheckpointExistsError):
        sw.Checkpointer(tmp_path, memory=None)


def test_a_root_with_steps_of_a_package_that_is_missing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_PLUGINS", "off")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    (tmp_path / "iter_0000005" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"{}")
    with (
        pytest.raises(sw.CheckpointExistsError, match="legacy Megatron-LM"),
        sw.Checkpointer(tmp_path, memory=None) as checkpointer,
    ):
        checkpointer.restore({"w": torch.ones(2)})


def test_files_that_may_be_parts_are_not_offered_as_wholes(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"w": torch.ones(2)}, tmp_path / f"consolidated.0{rank}.pth")
    said = r"Open one of consolidated\.00\.pth, consolidated\.01\.pth\. If these files are parts"
    with pytest.raises(sw.CheckpointNotFoundError, match=said):
        sw.open(tmp_path)


def test_of_many_checkpoints_below_some_are_examples(foreign: Path, tmp_path: Path) -> None:
    for step in range(11, 19):
        shutil.copytree(foreign, tmp_path / f"step_{step}")
    shown = ", ".join(f"step_{step}" for step in range(11, 19))
    with pytest.raises(
        sw.CheckpointNotFoundError, match=f"Open a checkpoint below, for example {shown}"
    ):
        sw.open(tmp_path)


def test_of_many_files_that_may_be_parts_some_are_examples(tmp_path: Path) -> None:
    for rank in range(9):
        torch.save({"w": torch.ones(2)}, tmp_path / f"consolidated.0{rank}.pth")
    said = r"Open one of the files there, for example consolidated\.01\.pth, .*\.08\.pth\. If these"
    with pytest.raises(sw.CheckpointNotFoundError, match=said):
        sw.open(tmp_path)


def test_what_a_function_to_start_from_raises_says_where_it_comes_from(tmp_path: Path) -> None:
    def start(state: object) -> sw.LoadReport:
        raise KeyError("weights")

    with (
        sw.Checkpointer(tmp_path / "run", memory=None, start_from=start) as checkpointer,
        pytest.raises(KeyError) as caught,
    ):
        checkpointer.restore({"x": 0})
    assert caught.value.__notes__ == [
        "start_from: raised by this function, which was called with the state"
    ]


def test_a_function_to_start_from_gives_a_report(foreign: Path, tmp_path: Path) -> None:
    start = lambda _: None  # noqa: E731
    with (
        sw.Checkpointer(tmp_path / "run", memory=None, start_from=start) as checkpointer,  # type: ignore[arg-type]
        pytest.raises(sw.StateError, match=r"start_from returned None"),
    ):
        checkpointer.restore({"model": {"w": torch.zeros(2, 3)}})


def test_groups_that_number_parameters_say_what_to_do(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    groups = [{"params": [layer.weight for layer in model]}]
    groups.append({"params": [layer.bias for layer in model]})
    optimizer = torch.optim.AdamW(groups)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "a.pt")
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(sw.StateError, match=r"Save with names .* or load without the optimizer"):
        sw.load(tmp_path / "a.pt", {"model": model, "optimizer": optimizer})
    sw.load(tmp_path / "a.pt", {"model": model})


def load_where_only_one_sees(folder: str) -> str:
    """Rank 0 is where the checkpoint is, and rank 1 elsewhere; both call it the same.

    Each wants another tensor, as what both want is read by one.
    """
    rank = dist.get_rank()
    os.chdir("/" if rank else folder)
    try:
        sw.load("/proc/self/cwd/large", {"s": {f"w{rank}": torch.zeros(100_000)}})
    finally:
        os.chdir("/")
    return ""


def test_files_that_one_rank_does_not_see_fail_on_all(gang: Gang, tmp_path: Path) -> None:
    """At once: no rank waits for the one that gave up."""
    state = {"s": {"w0": torch.ones(100_000), "w1": torch.ones(100_000)}}
    dcp.save(state, checkpoint_id=tmp_path / "large", no_dist=True)
    with pytest.raises(GangError) as caught:
        gang.run(load_where_only_one_sees, str(tmp_path), world=2, group_timeout=10.0)
    said = {rank: str(error) for rank, error in caught.value.exceptions.items()}
    assert type(caught.value.exceptions[0]) is sw.RankError
    for text in said.values():
        assert "distcp in /proc/self/cwd/large: the file is missing" in text


class Mine:
    """A class that no reader knows."""


def test_values_of_unknown_classes_are_left_out_on_request(tmp_path: Path) -> None:
    weights = torch.arange(4.0)
    torch.save({"model": {"w": weights}, "mine": Mine(), "epoch": 3}, tmp_path / "one.pt")
    with pytest.raises(sw.FormatError, match=r"Mine.*skip_unknown"):
        sw.open(tmp_path / "one.pt")
    found = sw.open(tmp_path / "one.pt", skip_unknown=True)
    assert torch.equal(found.tensors()["model.w"][...], weights)
    assert found["epoch"] == 3
    assert found.left_out == (
        f"mine: it contains an object of {__name__}.Mine, and shardwise runs no code from pickles: "
        "save it as tensors and plain values if you need it",
    )
    out = torch.zeros(4)
    sw.load(tmp_path / "one.pt", {"model": {"w": out}}, skip_unknown=True)
    assert torch.equal(out, weights)
    report = sw.export(tmp_path / "one.pt", tmp_path / "ours", to="native", skip_unknown=True)
    assert report.left_out == found.left_out
    assert set(sw.open(tmp_path / "ours")) == {"model.w", "epoch"}


def test_a_foreign_checkpoint_is_no_root_of_a_run(foreign: Path) -> None:
    """Nothing would be restored, and files of two checkpoints mixed."""
    before = sorted(path.name for path in foreign.iterdir())
    with pytest.raises(sw.CheckpointExistsError, match=rf"PyTorch DCP.*start_from='{foreign}'"):
        sw.Checkpointer(foreign, memory=None)
    with pytest.raises(sw.CheckpointExistsError, match=r"PyTorch DCP.*another directory"):
        sw.save(foreign, {"w": torch.ones(2)}, overwrite=True)
    assert sorted(path.name for path in foreign.iterdir()) == before
    target = {"model": {"w": torch.zeros(2, 3)}}
    for _ in range(2):
        with sw.Checkpointer(foreign, memory=None, start_from=foreign) as checkpointer:
            step = checkpointer.restore(target)
            checkpointer.save((step or 0) + 1, target)
    assert checkpointer.steps() == [11, 12]  # the path of the first one has its step


def test_a_checkpoint_of_ours_is_no_root_of_a_run(tmp_path: Path) -> None:
    sw.save(tmp_path / "one", {"w": torch.ones(2)})
    with pytest.raises(sw.CheckpointExistsError, match=r"of shardwise.*start_from='.*one'"):
        sw.Checkpointer(tmp_path / "one", memory=None)
    with pytest.raises(sw.CheckpointExistsError, match="pass another directory"):
        sw.Checkpointer(tmp_path / "one", memory=None, start_from=tmp_path / "one")


def test_of_several_formats_one_is_to_be_chosen(foreign: Path) -> None:
    safetensors.torch.save_file({"v": torch.ones(2)}, foreign / "model.safetensors")
    with pytest.raises(sw.StateError, match=r"DCP and Hugging Face: choose one by format='dcp'"):
        sw.open(foreign)
    assert list(sw.open(foreign, format="hf")) == ["model.v"]
    assert list(sw.open(foreign, format="dcp")) == ["model.w"]
    out = {"model": {"w": torch.zeros(2, 3)}}
    sw.load(foreign, out, format="dcp")
    assert out["model"]["w"].sum() == 15
    with pytest.raises(
        sw.CheckpointNotFoundError, match=r"of PyTorch DCP \(format='dcp'\) and Hug"
    ):
        sw.open(foreign, format="torch")
    with pytest.raises(sw.StateError, match="megatron, bytecheckpoint"):
        sw.open(foreign, format="gguf")


def test_a_foreign_format_is_not_read_from_a_checkpoint_of_shardwise(tmp_path: Path) -> None:
    sw.save(tmp_path, {"w": torch.ones(2)})
    with pytest.raises(sw.StateError, match=r"is a shardwise checkpoint.*leave out format="):
        sw.open(tmp_path, format="dcp")


def test_a_file_is_no_place_to_convert_into(foreign: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    for target in ("taken", "taken/below", "taken/below/it"):
        with pytest.raises(sw.CheckpointExistsError, match=r"taken is a file. .* new directory"):
            sw.export(foreign, tmp_path / target, to="native")
    assert (tmp_path / "taken").read_text() == "mine"
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(sw.CheckpointExistsError, match="link is a dangling symbolic link"):
        sw.export(foreign, tmp_path / "link", to="native")


def test_a_text_is_no_specification_yet(foreign: Path) -> None:
    with pytest.raises(sw.StateError, match=r"spec='\* -> \*': .* sw\.spec"):
        sw.open(foreign, spec="* -> *")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["/abs", "../../x", "a b", "x" * 300, "ü"])
def test_a_name_that_is_no_path_is_refused_before_any_is_written(name: str, tmp_path: Path) -> None:
    weights = {name: torch.ones(3)}
    optimizer = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save({"model": weights, "optimizer": optimizer}, tmp_path / "one.pt")
    with pytest.raises(sw.StateError, match=r"names files after parameters"):
        sw.export(tmp_path / "one.pt", tmp_path / "new", to="deepspeed-universal")
    assert not (tmp_path / "new").exists()


def test_names_that_are_one_once_joined_are_told(tmp_path: Path) -> None:
    torch.save({"a": {"b": torch.ones(2)}, "a.b": torch.ones(2)}, tmp_path / "one.pt")
    with pytest.raises(sw.FormatError, match=r"one\.pt: the name 'a\.b' occurs twice .*joined by"):
        sw.open(tmp_path / "one.pt")
