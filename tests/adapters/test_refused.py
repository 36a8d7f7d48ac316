"""What cannot be saved or loaded as it is: refused at once, by name, and nothing is written."""

from __future__ import annotations

import traceback
import warnings
from collections import deque
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import shardwise as sw
from shardwise.testing.thread_group import ThreadGroup, run_ranks, run_ranks_and_catch


class Loader:
    """A Stateful that fails, one way or the other."""

    def __init__(self, *, saves: bool = True) -> None:
        self.saves = saves

    def state_dict(self) -> dict[str, Any]:
        if not self.saves:
            raise KeyError("boom")
        return {"at": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("boom")


def freed(n: int) -> torch.Tensor:
    tensor = torch.ones(n)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"x" * 5000: torch.ones(2)}, "5000|4096"),
        ({"x" * 5000: 1}, "4096"),
        ({"a\0b": torch.ones(2)}, "NUL"),
        ({"__shardwise__": {"x": torch.ones(2)}}, "__shardwise__"),
        ({"\ud800": 1}, "not valid Unicode"),
        ({"x": freed(4)}, "x: the tensor's storage was freed"),
        ({"x": torch.ones(2, device="meta")}, "x: the tensor is on the meta device"),
        ({"x": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, "x: nested"),
        (nn.Linear(2, 2), "the state is a Linear: it must be a dict"),
        ({"x": nn.Linear}, "x"),
        ({"x": datetime.now(timezone.utc)}, r"save value\.isoformat"),
        ({"x": np.random.default_rng(0)}, r"save generator\.bit_generator\.state"),
        ({"x": deque([1])}, r"save list\(value\)"),
        ({"x": DataLoader([1])}, r"use a loader of shardwise\.data"),
    ],
)
def test_refused_at_saving(tmp_path: Path, state: Any, said: str) -> None:
    with pytest.raises(sw.StateError, match=said):
        sw.save(tmp_path / "checkpoint", state)
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"step": -1}, "step=-1"),
        ({"step": 1.0}, "step=1.0"),
        ({"step": True}, "step=True"),
        ({"step": 2**70}, "18 digits"),
        ({"metrics": {"loss": "low"}}, "metrics="),
        ({"metrics": ["loss"]}, "metrics="),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(
    tmp_path: Path, options: Any, said: str
) -> None:
    with pytest.raises(sw.StateError, match=said):
        sw.save(tmp_path / "checkpoint", {"x": 1}, **options)
    assert not list(tmp_path.rglob("*"))


def test_a_step_may_be_any_whole_number(tmp_path: Path) -> None:
    assert sw.save(tmp_path, {"x": 1}, step=np.int64(3)).step == 3


@pytest.mark.parametrize(
    "place", ["", "~/run", None, 3, b"run", "file://host/run", "S3://bucket?retry=1"]
)
def test_what_is_no_place_is_refused(place: Any) -> None:
    with pytest.raises(sw.StoreError):
        sw.save(place, {"x": 1})


@pytest.mark.parametrize(
    "options", [{"only": "x"}, {"skip": "x"}, {"only": None}, {"only": [1]}, {"rename": ["x"]}]
)
def test_patterns_and_names_of_the_wrong_type_are_refused(tmp_path: Path, options: Any) -> None:
    sw.save(tmp_path, {"x": torch.ones(2)})
    with pytest.raises(sw.StateError, match=next(iter(options))):
        sw.load(tmp_path, {"x": torch.zeros(2)}, **options)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (torch.zeros(4, device="meta"), "x: the tensor is on the meta device"),
        (freed(4), "x: the tensor's storage was freed"),
        (np.frombuffer(bytes(16), np.float32), "x: the array is read-only"),
        (1, "x: a tensor in the checkpoint, a plain value in the target"),
        (sw.PerRank(1), "x: a tensor in the checkpoint, a per-rank value in the target"),
    ],
)
def test_refused_at_loading(tmp_path: Path, target: Any, said: str) -> None:
    sw.save(tmp_path, {"x": torch.ones(4)})
    with pytest.raises((sw.StateError, sw.MismatchError), match=said) as caught:
        sw.load(tmp_path, {"x": target})
    assert "checkpoint only" not in str(caught.value)


def test_a_read_only_array_is_saved_without_a_word(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sw.save(tmp_path, {"x": np.frombuffer(bytes(range(16)), np.uint8)})
    assert sw.open(tmp_path)["x"][...].tolist() == list(range(16))  # type: ignore[index]


def of_each_rank(_: list[Any], rank: int, world: int) -> object:
    raise IndexError(f"rank {rank} of {world}")


def load_on_two(place: Path, state: Any) -> list[object]:
    return run_ranks(2, lambda group: sw.load(place, dict(state), group=group))


@pytest.mark.parametrize(
    ("act", "raised", "said"),
    [
        (
            lambda place: sw.save(place / "new", {"a": {"loader": Loader(saves=False)}}),
            KeyError,
            "a.loader: raised by its state_dict()",
        ),
        (
            lambda place: sw.save(place / "new", {"own": sw.PerRank(Loader(saves=False))}),
            KeyError,
            "own: raised by its state_dict() or capture()",
        ),
        (
            lambda place: sw.load(place, {"loader": Loader()}),
            KeyError,
            "loader: raised by its load_state_dict()",
        ),
        (
            lambda place: sw.load(place, {"own": sw.PerRank(Loader())}),
            KeyError,
            "own: raised by its load_state_dict() or restore()",
        ),
        (
            lambda place: sw.load(place, {"loader": 0}, rename=lambda name: {}[name]),
            KeyError,
            "loader: rename= raised this error for this name",
        ),
    ],
)
def test_what_the_callers_code_raises_keeps_its_type_and_says_of_which_key_it_is(
    tmp_path: Path, act: Callable[[Path], Any], raised: type[Exception], said: str
) -> None:
    sw.save(tmp_path, {"loader": Loader(), "own": sw.PerRank(Loader())})
    with pytest.raises(raised) as caught:
        act(tmp_path)
    assert said in caught.value.__notes__


def test_a_per_rank_value_names_its_key_where_the_world_has_another_size(tmp_path: Path) -> None:
    sw.save(tmp_path, {"own": sw.PerRank(3)})
    with pytest.raises(sw.StateError, match=r"own: .*saved by 1 rank.*loaded by 2"):
        load_on_two(tmp_path, {"own": sw.PerRank(0)})
    with pytest.raises(IndexError, match=r"rank . of 2") as caught:
        load_on_two(tmp_path, {"own": sw.PerRank(0, resize=of_each_rank)})
    assert caught.value.__notes__ == ["own: raised by its resize or for_rank()"]


def test_the_other_ranks_hear_of_which_key_it_is(tmp_path: Path) -> None:
    def save(group: ThreadGroup) -> object:
        return sw.save(tmp_path, {"loader": Loader(saves=group.rank == 0)}, group=group)

    here, there = run_ranks_and_catch(2, save)
    assert isinstance(there, KeyError)
    assert isinstance(here, sw.RankError)
    assert here.failures == {1: "KeyError: 'boom' (loader: raised by its state_dict())"}


def test_a_damaged_file_that_a_stateful_reads_is_no_damage_of_the_checkpoint(
    tmp_path: Path,
) -> None:
    class Reads(Loader):
        def load_state_dict(self, state: Any) -> None:
            raise sw.CorruptionError("other.bin is damaged")

    sw.save(tmp_path, {"loader": Loader()})
    with pytest.raises(sw.StateError, match=r"loader: its load_state_dict.*other.bin is damaged"):
        sw.load(tmp_path, {"loader": Reads()})


def test_a_rename_that_gives_no_name_is_refused(tmp_path: Path) -> None:
    sw.save(tmp_path, {"x": 1})
    with pytest.raises(sw.StateError, match="x: rename= returned None"):
        sw.load(tmp_path, {"x": 0}, rename=lambda _: None)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("place", ["none", "file"])
def test_that_there_is_no_checkpoint_is_all_that_the_traceback_says(
    tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").write_text("no checkpoint")
    for call in (sw.open, lambda path: sw.load(path, {"x": 0})):
        with pytest.raises(sw.CheckpointNotFoundError) as caught:
            call(tmp_path / place)
        shown = "".join(traceback.format_exception(caught.value))
        assert shown.count("Traceback") == 1


@pytest.mark.parametrize("kind", [nn.Module, dict])
def test_an_expanded_target_takes_only_values_that_it_can_hold(tmp_path: Path, kind: Any) -> None:
    def target() -> Any:
        data = torch.zeros(1).expand(4)
        if kind is dict:
            return {"b": data}
        module = nn.Module()
        module.register_buffer("b", data)
        return module

    sw.save(tmp_path / "different", {"m": {"b": torch.arange(4.0)}})
    sw.save(tmp_path / "equal", {"m": {"b": torch.full((4,), float("nan"))}})
    with pytest.raises(sw.StateError, match=r"m\.b: the tensor overlaps itself"):
        sw.load(tmp_path / "different", {"m": target()})
    into = {"m": target()}
    sw.load(tmp_path / "equal", into)
    buffer = into["m"]["b"] if kind is dict else into["m"].b
    assert buffer.isnan().all()


def test_targets_that_share_a_part_of_their_memory_are_compared(tmp_path: Path) -> None:
    whole = torch.full((4,), 9.0)
    state = {"a": whole[:3], "b": whole[1:]}
    sw.save(tmp_path / "different", {"a": torch.ones(3), "b": torch.zeros(3)})
    with pytest.raises(sw.StateError, match="a and b share memory"):
        sw.load(tmp_path / "different", state)
    sw.save(tmp_path / "equal", {"a": torch.tensor([1.0, 2, 3]), "b": torch.tensor([2.0, 3, 4])})
    sw.load(tmp_path / "equal", state)
    assert whole.tolist() == [1, 2, 3, 4]


def test_targets_whose_elements_alternate_share_nothing(tmp_path: Path) -> None:
    source = torch.arange(12.0).reshape(3, 4)
    sw.save(tmp_path, {"left": source[:, :2], "right": source[:, 2:]})
    target = torch.zeros(3, 4)
    sw.load(tmp_path, {"left": target[:, :2], "right": target[:, 2:]})
    assert torch.equal(target, source)


def test_an_optimizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    def run(kind: Any) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        optimizer = kind(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    sw.save(tmp_path, run(torch.optim.AdamW))
    with pytest.raises(sw.MismatchError, match=r"saved by another kind of optimizer.*skip=\['"):
        sw.load(tmp_path, run(torch.optim.SGD))
    sw.load(tmp_path, run(torch.optim.Adam))


def test_a_parameter_does_not_move_to_an_optimizer_of_another_kind(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    weight, bias = [model.weight], [model.bias]
    saved = [torch.optim.AdamW(weight), torch.optim.SGD(bias)]
    turned = [torch.optim.SGD(weight), torch.optim.AdamW(bias)]
    sw.save(tmp_path, {"model": model, "optimizer": saved})
    with pytest.raises(sw.MismatchError, match=r"saved by another kind of optimizer.*betas"):
        sw.load(tmp_path, {"model": model, "optimizer": turned})
    assert "betas" not in turned[0].param_groups[0]


def test_a_box_outside_of_a_tensor_is_refused(tmp_path: Path) -> None:
    sw.save(tmp_path, {"x": torch.ones(4, 8)})
    checkpoint = sw.open(tmp_path)
    for box, out in [
        (sw.Box((3, 0), (2, 8)), torch.zeros(2, 8)),
        (sw.Box((0,), (4,)), torch.zeros(4)),
        (sw.Box((0, 0), (2, 8)), torch.zeros(2, 8, dtype=torch.float64)),
        (sw.Box((0, 0), (2, 8)), torch.zeros(8, 2)),
    ]:
        with pytest.raises(sw.StateError, match="x: "):
            checkpoint.read_into("x", box, out)


def test_a_sink_that_fails_does_not_fail_what_it_is_told_of(tmp_path: Path) -> None:
    def sink(_: object) -> None:
        raise RuntimeError("no room for events")

    with pytest.warns(RuntimeWarning, match="no room"):
        sw.save(tmp_path, {"x": 1}, on_event=sink)
    assert sw.open(tmp_path)["x"] == 1
