"""What a load and a save ask of each value in the state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from shardwise.plan.lookup import SavedState
from shardwise.state.leaves import LocalState, ParameterOrder
from shardwise.state.objects import JsonValue
from shardwise.state.selection import Selection


class Binding:
    """One value of the state, with the name under which it is saved.

    Subclasses override `local_state`, `targets`, and those other methods that they need.
    """

    name: str
    kind: ClassVar[Literal["module", "optimizer", "value"]] = "value"

    def local_state(self) -> LocalState:
        """Return what there is to save now."""
        raise NotImplementedError

    def targets(self, saved: SavedState, selection: Selection) -> LocalState:
        """Return what a load fills of the selected names. Missing optimizer state is created."""
        raise NotImplementedError

    def restore(self, values: Mapping[str, JsonValue]) -> None:
        """Set plain values, by their names in the target, once all tensors are filled."""

    def restore_ranks(self, encoded: list[JsonValue], rank: int, world: int) -> None:
        """Set this rank's value, given the values of all ranks that saved."""

    def rebuild_weights(self) -> None:
        """Compute a module's weights from the master weights that were loaded.

        All ranks call it together, after the load has succeeded on all of them.
        """

    def parameter_order(self) -> ParameterOrder | None:
        """Return the order in which an optimizer numbers its parameters, if that is known."""
        return None
