"""How to save and to load, as a user says it, checked."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import SupportsIndex

from shardwise.errors import StateError
from shardwise.manifest.names import checked_name


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How to save; see `shardwise.save`."""

    step: int | None = None
    overwrite: bool = False
    check_replicas: bool = False
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def checked(
        cls,
        step: SupportsIndex | None,
        overwrite: bool,
        check_replicas: bool,
        metrics: Mapping[str, float] | None,
    ) -> SaveOptions:
        """Options as a user gives them.

        Raises:
            StateError: the step is no whole number from 0 on, or a metric is no number.
        """
        if step is not None:
            if isinstance(step, bool) or not hasattr(step, "__index__"):
                raise StateError(f"step={step!r}: a whole number is needed")
            step = operator.index(step)
            if not 0 <= step < 10**18:
                raise StateError(f"step {step}: from 0 on, and of at most 18 digits")
        try:
            values = {checked_name(name): float(value) for name, value in (metrics or {}).items()}
        except (TypeError, ValueError, AttributeError) as error:
            raise StateError(f"metrics={metrics!r}: a dict of numbers is needed") from error
        return cls(step=step, overwrite=overwrite, check_replicas=check_replicas, metrics=values)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load; see `shardwise.load`."""

    strict: bool = True
    cast: bool = False
    verify: bool = True
