"""Choose the cases of a large parametrization that the default test run takes."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest
import torch
from hypothesis import settings
from torch.torch_version import TorchVersion

OLD_TORCH = TorchVersion(torch.__version__) < "2.10"
"""Whether torch has defects that torch 2.10 mends, and that are in the way of some tests."""

LONG_EXAMPLES = 1000  # of each property, unless it states a number


def mostly_long(cases: Iterable[object], default: Collection[object]) -> list[object]:
    """Return all cases, of which those outside of `default` are marked `long`."""
    return [
        case
        if case in default
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        for case in cases
    ]


def examples(count: int, **options: object) -> settings:
    """Return hypothesis settings with `count` examples; with five times as many in `make test-all`.

    A number in `settings` itself would replace that of the profile.
    """
    default = settings.default
    is_long = default is not None and default.max_examples >= LONG_EXAMPLES
    return settings(max_examples=5 * count if is_long else count, **options)  # type: ignore[arg-type]
