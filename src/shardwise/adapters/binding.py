"""The interface through which saves and loads access a value of the state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from shardwise.plan.name_lookup import SavedNames
from shardwise.state.leaves import LocalState, ParameterOrder
from shardwise.state.plain_values import JsonValue
from shardwise.state.selection import Selection


class Binding:
    """Saves and loads one value of the state.

    Subclasses override `local_state` and `targets`, and other methods if they need them.

    Attributes:
        name: the name under which the value is saved.
        kind: the kind of value. Modules are bound before optimizers, and other values last.
    """

    name: str
    kind: ClassVar[Literal["module", "optimizer", "value"]] = "value"

    def local_state(self) -> LocalState:
        """Return the tensors and values to save."""
        raise NotImplementedError

    def targets(self, saved: SavedNames, selection: Selection) -> LocalState:
        """Return the tensors and values to load. Missing optimizer state is created.

        Args:
            saved: the contents of the checkpoint.
            selection: the names to load.
        """
        raise NotImplementedError

    def restore(self, values: Mapping[str, JsonValue]) -> None:
        """Set plain values, after all tensors are filled.

        Args:
            values: encoded values by their names in the target.
        """

    def restore_ranks(self, encoded: list[JsonValue], rank: int, world: int) -> None:
        """Set this rank's value.

        Args:
            encoded: the values of all ranks that saved, encoded.
            rank: this rank.
            world: the number of ranks that load.
        """

    def rebuild_weights(self) -> None:
        """Compute a module's weights from the loaded master weights. This is a collective.

        It is called after the load has succeeded on all ranks.
        """

    def parameter_order(self) -> ParameterOrder | None:
        """Return the order in which an optimizer numbers its parameters; None if it is unknown."""
        return None
