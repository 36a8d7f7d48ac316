"""Fixtures for all tests. The workers of `gang` stay warm for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from shardwise.testing import Gang
from tests.breadth import LONG_EXAMPLES

settings.register_profile("shardwise", deadline=None)  # time limits fail on busy machines
settings.register_profile("long", settings.get_profile("shardwise"), max_examples=LONG_EXAMPLES)
settings.load_profile("shardwise")
PRELOAD = ("tests.preloaded",)


@pytest.fixture(scope="session")
def gang() -> Iterator[Gang]:
    """A gang of up to four workers. Each starts when a test first needs it."""
    with Gang(4, preload=PRELOAD) as gang:
        yield gang


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gang" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)
