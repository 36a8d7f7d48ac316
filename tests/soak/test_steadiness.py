"""The leak checks of soak tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.steadiness import MOST_HIDDEN, MOST_SLOTS, MOST_STEPS, Steadiness, growth_of

RUN = Path("node0", "shardwise-0", "runs", "0" * 16)


def leaks(base: Path, names: list[str]) -> list[str]:
    """Return the leaks found on a node with these files of a run."""
    for name in names:
        path = base / RUN / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    steadiness = Steadiness(base)
    steadiness.look({})
    return steadiness.failures()


@pytest.mark.parametrize(
    ("pattern", "most", "leak"),
    [
        ("free/rank-00000-{}", MOST_SLOTS, "slots"),
        ("step-00000001/r{:05d}-0.safetensors", MOST_SLOTS, "slots"),
        ("step-{:08d}/manifest.json", MOST_STEPS, "snapshots"),
        ("step-00000001/.entry.json.{}", MOST_HIDDEN, "hidden files"),
    ],
)
def test_more_than_belongs_there_is_a_leak(
    tmp_path: Path, pattern: str, most: int, leak: str
) -> None:
    names = [pattern.format(number) for number in range(most + 1)]
    assert leaks(tmp_path / "flat", names[:-1]) == []
    (found,) = leaks(tmp_path / "leaky", names)
    assert found.startswith(f"{most + 1} {leak} in ")


def test_memory_that_is_used_for_a_moment_is_no_growth() -> None:
    flat = [30.0] + [48.0, 48.0, 85.0] * 20
    assert growth_of(flat) == 0.0
    assert growth_of([each + index for index, each in enumerate(flat)]) > 25.0
