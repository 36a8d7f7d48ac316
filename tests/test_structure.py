"""The size of the package and the borders of its packages. Figures may fall, but not grow.

`python -m tests.structure` prints the figures.
"""

from __future__ import annotations

from dataclasses import asdict

import pytest

import shardwise
from tests.structure import Figures, measure, names_from_other_packages

LIMITS = Figures(
    modules=348,
    statements=37104,
    modules_of_api=90,
    statements_of_api=10223,
    record_types=282,
    names_across_packages=424,  # the ports are used from everywhere
    names_of_readers=30,
    test_files_with_inner_imports=72,
)
"""Lower a limit when its figure has fallen."""


@pytest.fixture(scope="module")
def figures() -> Figures:
    return measure()


@pytest.mark.parametrize("name", list(asdict(LIMITS)))
def test_a_figure_does_not_grow(figures: Figures, name: str) -> None:
    assert getattr(figures, name) <= getattr(LIMITS, name)


@pytest.mark.parametrize("package", ["cli", "integrations"])
def test_fronts_use_public_names(package: str) -> None:
    """The ports are public, too; and who prints may use what formats text."""
    inner = {
        (module, name)
        for module, name in names_from_other_packages(package)
        if name not in shardwise.__all__
        and not module.startswith("ports.")
        and not (module in ("events", "words") and name.startswith(("format_", "parse_")))
    }
    assert not inner
