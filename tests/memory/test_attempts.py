"""Duties that fail: how often they are tried again, and what the log says of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.errors import StoreError
from shardwise.memory.agent import attempts
from shardwise.memory.agent.agent import undisturbed
from shardwise.memory.agent.attempts import Attempts, Duty, Seen
from shardwise.memory.agent.duties import attempt
from shardwise.memory.home import Home, Place


class Clock:
    """The time, as a test has it."""

    now = 1000.0

    def monotonic(self) -> float:
        """In seconds."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time that attempts go by."""
    clock = Clock()
    monkeypatch.setattr(attempts, "time", clock)
    return clock


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A snapshot of which there is nothing."""
    place = Place(Home(tmp_path).run("0" * 16), 3)
    place.path.mkdir(parents=True)
    return place


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """All that is logged."""
    caplog.set_level(logging.INFO)
    return caplog


def duty_of(attend: Callable[[Place], bool]) -> Duty:
    """There is always something to do."""
    return Duty(lambda seen: ["something"], attend)


def seen(place: Place, *names: str) -> Seen:
    """A snapshot that has such files."""
    return Seen(place, {place.step: frozenset(names)})


class Failing:
    """A duty that fails, until it is told not to."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.times = 0

    def __call__(self, place: Place) -> bool:
        """Fail."""
        self.times += 1
        if self.error is not None:
            raise self.error
        return True


def test_what_fails_again_and_again_is_tried_ever_later_and_told_ever_more_rarely(
    place: Place, clock: Clock, told: pytest.LogCaptureFixture
) -> None:
    duty = Failing(ValueError("no"))
    kept = Attempts("seal", duty_of(duty))
    for _ in range(36_000):
        assert not (kept.is_due(seen(place)) and kept.attempt(seen(place)))
        clock.now += 0.1
    assert 60 < duty.times < 75
    assert told.text.count("Traceback") == 1
    assert [each.levelname for each in told.records] == ["ERROR"] * 7
    assert "ValueError: no (64 times by now)" in told.text
    duty.error = None
    clock.now += 60.0
    assert kept.is_due(seen(place))
    assert kept.attempt(seen(place))
    assert kept.attempt(seen(place))


def test_what_fails_once_is_tried_again_at_once(place: Place, clock: Clock) -> None:
    duty = Failing(ValueError("no"))
    kept = Attempts("seal", duty_of(duty))
    assert not kept.attempt(seen(place))
    duty.error = None
    assert kept.is_due(seen(place))
    assert kept.attempt(seen(place))


def test_the_same_failure_of_many_snapshots_has_one_traceback(
    place: Place, clock: Clock, told: pytest.LogCaptureFixture
) -> None:
    kept = Attempts("seal", duty_of(Failing(ValueError("no"))))
    for step in range(100):
        each = Place(place.run, step)
        each.path.mkdir(exist_ok=True)
        kept.attempt(seen(each))
    assert told.text.count("Traceback") == 1
    assert len(told.records) == 7
    kept.forget_but({place.path})
    assert len(kept._places) == 1


def test_races_with_retirement_are_no_errors(
    place: Place, clock: Clock, told: pytest.LogCaptureFixture
) -> None:
    gone = Place(place.run, 4)
    Attempts("seal", duty_of(Failing(OSError("gone")))).attempt(seen(gone))
    duty = Failing(FileNotFoundError("manifest.json"))
    kept = Attempts("commit", duty_of(duty))
    kept.attempt(seen(place))
    place.abandon()
    Attempts("protect", duty_of(Failing(StoreError("is abandoned")))).attempt(seen(place))

    def refused() -> int:
        place.refuse_abandoned()
        return 1

    assert "is abandoned" in attempt(place, refused)[1]
    assert [each.levelname for each in told.records] == ["INFO"] * 4
    assert "Traceback" not in told.text


def test_a_file_that_stays_away_is_an_error(
    place: Place, clock: Clock, told: pytest.LogCaptureFixture
) -> None:
    kept = Attempts("seal", duty_of(Failing(FileNotFoundError("data"))))
    kept.attempt(seen(place))
    clock.now += 1.0
    kept.attempt(seen(place))
    assert [each.levelname for each in told.records] == ["INFO", "ERROR"]
    assert "Traceback" in told.text


def test_nothing_is_done_again_while_the_signs_are_the_same(place: Place) -> None:
    did = iter([True, False, False])
    kept = Attempts("seal", Duty(lambda seen: seen.names, lambda place: next(did)))
    assert not kept.is_due(seen(place))
    assert kept.is_due(seen(place, "one"))
    assert kept.attempt(seen(place, "one"))
    assert kept.is_due(seen(place, "one"))
    assert not kept.attempt(seen(place, "one"))
    assert not kept.is_due(seen(place, "one"))
    assert kept.is_due(seen(place, "one", "two"))
    assert not kept.attempt(seen(place, "one", "two"))
    assert kept.is_due(seen(place, "two"))
    kept.forget_but(())
    assert kept.is_due(seen(place, "one", "two"))


def test_what_others_hold_is_asked_for_again_and_is_no_error(
    place: Place, told: pytest.LogCaptureFixture
) -> None:
    asked = []

    def attend(place: Place) -> bool:
        asked.append(place)
        return False

    kept = Attempts("seal", duty_of(undisturbed(attend)))
    with place.hold(shared=False) as held:
        assert held
        assert not kept.attempt(seen(place))
    assert not asked
    assert kept.is_due(seen(place))
    assert not kept.attempt(seen(place))
    assert asked == [place]
    assert not kept.is_due(seen(place))
    assert not told.records
