"""The size of the package and the borders of its packages. Figures may fall, but not grow.

`python -m tests.structure` prints the figures.
"""

from __future__ import annotations

from dataclasses import asdict

import pytest

import shardwise
from tests.structure import Figures, measure, names_from_other_packages

LIMITS = Figures(
    statements=38898,
    statements_of_kernel=9605,
    statements_of_api=9257,
    record_types=286,
    names_of_parts_in_kernel=0,
    names_of_kernel_in_parts=147,
    names_of_readers=34,
    test_files_with_inner_imports=72,
)
"""Lower a limit when its figure has fallen."""


@pytest.fixture(scope="module")
def figures() -> Figures:
    return measure()


@pytest.mark.parametrize("name", list(asdict(LIMITS)))
def test_a_figure_does_not_grow(figures: Figures, name: str) -> None:
    assert getattr(figures, name) <= getattr(LIMITS, name)


INNER = "integrations.dcp.partial_save"
"""The drop-in for DCP saves without rounds of shardwise, because DCP has its own. So this module
calls the stages of a save one by one, and they are no public names."""


@pytest.mark.parametrize("package", ["parts.cli", "integrations"])
def test_fronts_use_public_names(package: str) -> None:
    """The ports are public, too; and who prints may use what formats text."""
    inner = {
        (module, name)
        for module, name in names_from_other_packages(package, besides=INNER)
        if name not in shardwise.__all__
        and not module.startswith("ports.")
        and not (
            module in ("kernel.events", "parts.words") and name.startswith(("format_", "parse_"))
        )
    }
    assert not inner
