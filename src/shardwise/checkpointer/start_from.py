"""Start a run: load `start_from`, or refuse to begin in a root that has other checkpoints."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.checkpointer.restoring import START, with_all_origins
from shardwise.kernel import api
from shardwise.kernel.adapters import torch_optimizers_in
from shardwise.kernel.engine.group import Group
from shardwise.kernel.engine.load import LoadReport
from shardwise.kernel.engine.rounds import Round
from shardwise.kernel.errors import CheckpointExistsError, StateError, add_note
from shardwise.kernel.loading import State, refuse_unknown_step
from shardwise.kernel.opening import foreign_formats_at
from shardwise.kernel.store import Store
from shardwise.parts.formats.steps import newest_first
from shardwise.ports.hooks import RestoreReport

StartFrom = api.Place | Callable[[State], LoadReport]
"""`Checkpointer(start_from=…)`: a checkpoint, the root of another run, or a function that loads."""
MOST_STEPS_EXAMINED = 64
"""How many foreign checkpoints in a root are looked at, newest first."""


def start(
    start_from: StartFrom | None,
    root: Store,
    state: State,
    load: Callable[[api.Place], LoadReport],
    group: Group,
) -> tuple[RestoreReport | None, int | None]:
    """Start a run whose root has no checkpoint of shardwise: load `start_from`, if it is given.

    All ranks call this together.

    Returns:
        The report, None without `start_from`; and the step to continue from. The step is None if
        the training starts anew: the state has optimizers, and none of them was loaded.

    Raises:
        CheckpointExistsError: without `start_from`, the root has checkpoints of another library.
        StateError: the function `start_from` did not return the report of `shardwise.load`; or an
            optimizer was loaded, and the step of the checkpoint is unknown.
    """
    if start_from is None:
        _refuse_foreign_steps(root, group)
        return None, None
    loaded = _call_with_note(start_from, state) if callable(start_from) else load(start_from)

    with Round(group, "starting from another run") as all_ranks:
        if not isinstance(loaded, LoadReport):
            raise StateError(
                f"start_from returned {loaded!r}: expected the report of sw.load; end the function "
                "with `return sw.load(path, state)`"
            )
        if loaded.step is None:  # `load` has refused this before it wrote anything; a function not
            refuse_unknown_step(loaded.path, loaded.optimizers)
        has_optimizers = any(True for _ in torch_optimizers_in(state))
        continues = bool(loaded.optimizers) or not has_optimizers
        any_continues = all_ranks.all_reduce(continues, bool, any)
    origins = with_all_origins({START: loaded.bytes_read})
    report = RestoreReport(loaded.step, START, loaded, (), origins)
    return report, loaded.step if any_continues else None


def _call_with_note(function: Callable[[State], LoadReport], state: State) -> LoadReport:
    try:
        return function(state)
    except Exception as error:
        add_note(error, "start_from: raised by this function, which was called with the state")
        raise


def _refuse_foreign_steps(root: Store, group: Group) -> None:
    """Refuse to start at step 0 in a root with checkpoints of another library. Name the newest."""
    with Round(group, "starting a run", rank0_only=True):
        if group.rank == 0 and (found := _newest_foreign_step(root)):
            place, formats = found
            raise CheckpointExistsError(
                f"{root} has checkpoints of {formats}, but none of shardwise: pass start_from="
                f"{str(place)!r} to the Checkpointer to continue from that checkpoint, or another "
                "root to start at step 0"
            )


def _newest_foreign_step(root: Store) -> tuple[Store, str] | None:
    """Return the newest foreign checkpoint directly below a place, and the names of its formats."""
    for name in newest_first(root.list())[:MOST_STEPS_EXAMINED]:
        if formats := foreign_formats_at(root.at(name)):
            return root.at(name), formats
    return None


def refuse_steps_of_another_run(root: Store, steps: list[int]) -> None:
    """Refuse the first save of a run that restored nothing, if the root already had steps.

    Args:
        steps: the steps that the root had when the Checkpointer opened it.

    Raises:
        CheckpointExistsError: the root has steps.
    """
    if not steps:
        return
    shown = f"steps {steps[0]} … {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    raise CheckpointExistsError(
        f"{root} has checkpoints ({shown}), but none was restored before this save, so a later "
        "restore could mix two trainings. To continue that training, call restore before the "
        f"first save. To start another, pass a new root; start_from={str(root)!r} then loads "
        "the newest checkpoint. To replace steps of this root, pass overwrite=True to save"
    )
