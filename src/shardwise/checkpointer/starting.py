"""Start a run that has no checkpoint yet from another one: `Checkpointer(start_from=…)`."""

from __future__ import annotations

from collections.abc import Callable

from shardwise import api
from shardwise.adapters import torch_optimizers_in
from shardwise.checkpointer.restoring import START, RestoreReport, bytes_by_origin
from shardwise.engine.exchange import exchange
from shardwise.engine.group import Group
from shardwise.engine.load import LoadReport
from shardwise.errors import StateError, add_note
from shardwise.loading import State

StartFrom = api.Place | Callable[[State], LoadReport]
"""`Checkpointer(start_from=…)`: a checkpoint, the root of another run, or a function that loads."""


def load_start_from(
    start_from: StartFrom, state: State, load: Callable[[api.Place], LoadReport], group: Group
) -> tuple[RestoreReport, int | None]:
    """Load `start_from`. All ranks call this together.

    Returns:
        The report, and the step to continue from. The step is None if the state has optimizers and
        none of them was loaded: then the training starts anew.

    Raises:
        StateError: the function `start_from` did not return the report of `shardwise.load`.
    """
    loaded = _call_with_note(start_from, state) if callable(start_from) else load(start_from)

    def keeps_step() -> bytes:
        if not isinstance(loaded, LoadReport):
            raise StateError(
                f"start_from returned {loaded!r}: expected the report of sw.load; end the function "
                "with `return sw.load(path, state)`"
            )
        has_optimizers = any(True for _ in torch_optimizers_in(state))
        return b"1" if loaded.optimizers or not has_optimizers else b""

    any_keeps_step = exchange(group, "starting from another run", keeps_step, max)
    report = RestoreReport(loaded.step, START, loaded, (), bytes_by_origin(loaded, None))
    return report, loaded.step if any_keeps_step else None


def _call_with_note(function: Callable[[State], LoadReport], state: State) -> LoadReport:
    try:
        return function(state)
    except Exception as error:
        add_note(error, "start_from: raised by this function, which was called with the state")
        raise
