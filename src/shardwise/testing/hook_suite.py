"""Conformance tests for run hooks: subclass `HookSuite` and define its `make_hook` fixture."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from shardwise.checkpointer import hooks
from shardwise.checkpointer.checkpointer import Checkpointer
from shardwise.kernel.errors import CheckpointExistsError
from shardwise.kernel.store import open_store
from shardwise.ports.hooks import MakeHook, Run, RunHook


class HookSuite:
    """The conformance tests of a hook.

    Define a subclass in a test module, with a fixture `make_hook` that returns the function that
    the entry point names.
    """

    @pytest.fixture
    def make_hook(self) -> MakeHook:
        """The function that makes the hook; it must return one for rank 0."""
        raise NotImplementedError("define a fixture `make_hook`")

    @pytest.fixture
    def hook(self, make_hook: MakeHook, tmp_path: Path) -> RunHook:
        """A hook of a run with one rank."""
        made = make_hook(Run(open_store(tmp_path / "root"), 0, 1))
        if made is None:
            pytest.fail("make_hook returned None for rank 0")
        return made

    @pytest.fixture
    def root(self, hook: RunHook, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Path:
        """A root whose Checkpointers have the hook."""
        caplog.set_level(logging.ERROR)
        return tmp_path / "root"

    def test_a_run_is_as_without_the_hook(
        self, hook: RunHook, root: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A run saves, continues and ends, and the hook raises nothing."""
        with self._installed(hook), Checkpointer(root, memory=None) as checkpointer:
            assert checkpointer.restore({"t": torch.zeros(9)}) is None
            for step in (1, 2):
                handle = checkpointer.save(step, {"t": torch.full((9,), float(step))})
                assert handle is not None
        state = {"t": torch.zeros(9)}
        with self._installed(hook), Checkpointer(root, memory=None) as checkpointer:
            assert checkpointer.restore(state) == 2
        assert torch.equal(state["t"], torch.full((9,), 2.0))
        assert not caplog.records

    def test_a_failure_of_a_save_stays_what_it_is(
        self, hook: RunHook, root: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The hook is told of a failure, and the caller gets the same error."""
        with self._installed(hook), Checkpointer(root, memory=None) as checkpointer:
            checkpointer.save(1, {"t": torch.zeros(9)})
            with pytest.raises(CheckpointExistsError):
                checkpointer.save(1, {"t": torch.zeros(9)})
        assert not caplog.records

    def test_a_run_that_fails_closes_the_hook(self, hook: RunHook, root: Path) -> None:
        """The error of the training is raised."""

        def train(step: int) -> float:
            with self._installed(hook), Checkpointer(root, memory=None) as checkpointer:
                checkpointer.save(step, {"t": torch.zeros(9)}, overwrite=True)
                return 1 / 0

        with pytest.raises(ZeroDivisionError):
            train(1)

    def test_a_durable_step_may_come_late(self, hook: RunHook) -> None:
        """Agents complete saves in the background, and failures come between."""
        hook.failed(OSError(28, "No space left on device"))
        for step in (3, 1):
            hook.saved(step)
        hook.closed(completed=False)

    @staticmethod
    def _installed(hook: RunHook) -> AbstractContextManager[object]:
        """Install the hook, as the entry point of a package would."""
        entry = SimpleNamespace(load=lambda: lambda run: hook)
        return mock.patch.object(hooks, "find_plugins", return_value=[entry])
