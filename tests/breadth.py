"""Choose the cases of a large parametrization that the default test run takes."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest


def mostly_long(cases: Iterable[object], default: Collection[object]) -> list[object]:
    """Return all cases, of which those outside of `default` are marked `long`."""
    return [
        case
        if case in default
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        for case in cases
    ]
