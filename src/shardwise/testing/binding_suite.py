"""Conformance tests for bindings: subclass `BindingSuite` and define its method `make_state`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import shardwise as sw
from shardwise.kernel.adapters import bind_state
from shardwise.kernel.errors import MismatchError
from shardwise.kernel.state.local_state import view_for_numpy
from shardwise.testing.thread_group import ThreadGroup, run_ranks

State = dict[str, Any]


class BindingSuite:
    """The conformance tests of a binding.

    Define a subclass in a test module, with the method `make_state`. Ranks are threads of one
    process, so a state that needs a process group is tested with one rank.

    Attributes:
        numbers_of_ranks: pairs of numbers of ranks: how many save, and how many load.
        fits_any_shape: whether a load accepts tensors of other shapes than those of the value.
    """

    numbers_of_ranks: ClassVar[Sequence[tuple[int, int]]] = ((1, 1), (2, 1), (1, 3), (3, 2))
    fits_any_shape: ClassVar[bool] = False

    def make_state(self, seed: int, rank: int, world: int) -> State:
        """Return a new state with the value to test.

        Args:
            seed: determines all contents of the value. Other seeds make other contents of the same
                names, shapes and dtypes.
            rank, world: this rank, and the number of ranks among which the value is divided.
        """
        raise NotImplementedError("define the method `make_state`")

    def test_a_load_restores_every_byte(self, tmp_path: Path) -> None:
        """A value that was loaded is the value that was saved, with any number of ranks."""
        for saving, loading in self.numbers_of_ranks:
            path = tmp_path / f"{saving}-{loading}"
            states = self._states(1, saving)
            expected = content(states)
            run_ranks(saving, partial(_call, sw.save, path, states))
            states = self._states(2, loading)
            assert content(states) != expected, "the seed changes nothing"
            run_ranks(loading, partial(_call, sw.load, path, states))
            assert without_ranks(content(states)) == without_ranks(expected)
            if saving == loading:
                assert content(states) == expected

    def test_names_depend_on_nothing(self) -> None:
        """Names are equal whatever the contents and the number of ranks, and begin with a key."""
        worlds = sorted({world for pair in self.numbers_of_ranks for world in pair})
        states = [self._states(seed, world) for seed in (1, 2) for world in worlds]
        names = [sorted(without_ranks(content(each))) for each in states]
        assert all(each == names[0] for each in names)
        keys = tuple(states[0][0])
        below = tuple(f"{key}." for key in keys)
        assert all(name in keys or name.startswith(below) for name in names[0])

    def test_a_missing_name_is_an_error(self, tmp_path: Path) -> None:
        """The error of a load names what the checkpoint lacks, and nothing is written."""
        sw.save(tmp_path / "c", self.make_state(1, 0, 1))
        for name in content([self.make_state(1, 0, 1)]):
            self._check_refused(tmp_path / "c", name, {name.partition(_OF_MEMBER)[0]: "absent"})

    def test_an_unexpected_name_is_an_error(self, tmp_path: Path) -> None:
        """The error of a load names what only the checkpoint has, and nothing is written."""
        state = self.make_state(1, 0, 1)
        name = f"{next(iter(state))}.unexpected"
        sw.save(tmp_path / "c", {**state, name: torch.ones(1)})
        self._check_refused(tmp_path / "c", name, {})

    def test_another_shape_is_an_error(self, tmp_path: Path) -> None:
        """The error of a load names the tensor whose shape differs, and nothing is written."""
        if self.fits_any_shape:
            pytest.skip("accepts tensors of any shape")
        state = self.make_state(1, 0, 1)
        sw.save(tmp_path / "c", {**state, "other": torch.zeros(3, 1, 7, 5)})
        for name in sw.open(tmp_path / "c").tensors():
            if name != "other":
                self._check_refused(tmp_path / "c", name, {name: "other"})

    def test_what_is_skipped_stays(self, tmp_path: Path) -> None:
        """A load changes only what `only` and `skip` select."""
        sw.save(tmp_path / "c", self.make_state(1, 0, 1))
        target = self.make_state(2, 0, 1)
        before = content([target])
        sw.load(tmp_path / "c", target, skip=["*"])
        assert content([target]) == before

    def _states(self, seed: int, world: int) -> list[State]:
        return [self.make_state(seed, rank, world) for rank in range(world)]

    def _check_refused(self, path: Path, name: str, rename: dict[str, str]) -> None:
        target = self.make_state(2, 0, 1)
        before = content([target])
        with pytest.raises(MismatchError) as caught:
            sw.load(path, target, rename=rename)
        named = name.partition(_OF_MEMBER)[0]
        assert any(problem.startswith(f"{named}:") for problem in caught.value.problems), caught
        assert content([target]) == before, f"{name}: the failed load has written something"


def _call(
    function: Callable[..., object], path: Path, states: Sequence[State], group: ThreadGroup
) -> None:
    function(path, states[group.rank], group=group)


_OF_MEMBER, _OF_RANK = " of ", " of rank "


def content(states: Sequence[State]) -> dict[str, object]:
    """Return what a save of these states stores, by name: whole tensors as bytes, and plain values.

    Args:
        states: the state of each rank.
    """
    found: dict[str, Any] = {}
    for rank, state in enumerate(states):
        for local_state in [binding.local_state() for binding in bind_state(state)]:
            for leaf in local_state.tensors:
                for fragment in leaf.fragments:
                    part = view_for_numpy(fragment.data).numpy()
                    whole = found.setdefault(leaf.name, np.zeros(leaf.shape, part.dtype))
                    whole[fragment.box.slices()] = part
            found |= local_state.objects
            for name, groups in local_state.grouped.items():
                found |= {
                    f"{name}{_OF_MEMBER}{m}": each for members, each in groups for m in members
                }
            found |= {
                f"{name}{_OF_RANK}{rank}": each for name, each in local_state.per_rank.items()
            }
    return {
        name: (each.shape, str(each.dtype), each.tobytes()) if hasattr(each, "tobytes") else each
        for name, each in found.items()
    }


def without_ranks(found: dict[str, object]) -> dict[str, object]:
    """Return the content without values of single ranks."""
    return {name: value for name, value in found.items() if _OF_RANK not in name}
