"""How fast to copy beside a training: what it leaves, and how bytes are spread over that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import StoreError
from shardwise.memory.trainer.copying import SAVES_MEASURED, SLACK_SHARE, CopyProgress, Pace, Slack
from tests.memory.test_sweep import forked


def run(total: int, bucket: int, target: float, seconds_a_byte: float) -> tuple[float, list[float]]:
    """Copy in buckets at a pace; when it is over, and when each bucket began."""
    now = [100.0]
    pace = Pace(total, target, lambda: now[0])
    began = []
    for at in range(0, total, bucket):
        nbytes = min(bucket, total - at)
        now[0] += pace.seconds_for(nbytes)
        began.append(now[0] - 100)
        now[0] += nbytes * seconds_a_byte
    return now[0] - 100, began


sizes = st.integers(1, 10_000)
seconds = st.floats(0, 100)


@given(sizes, sizes, seconds, seconds)
def test_it_takes_no_longer_than_the_target_or_than_the_copy_alone(
    total: int, bucket: int, target: float, copy: float
) -> None:
    ended, began = run(total, bucket, target, copy / total)
    assert ended <= max(target, copy) + 1e-6
    assert began[0] == 0
    assert began == sorted(began)


@given(sizes, sizes, seconds)
def test_a_copy_that_is_fast_is_spread_evenly(total: int, bucket: int, target: float) -> None:
    _, began = run(total, bucket, target, 0.0)
    assert began == pytest.approx([at * target / total for at in range(0, total, bucket)])


def test_a_copy_that_is_late_catches_up() -> None:
    now = [0.0]
    pace = Pace(100, 10.0, lambda: now[0])
    assert pace.seconds_for(10) == 0
    now[0] = 5.5  # the first took far too long
    assert [pace.seconds_for(10) for _ in range(5)] == [0.0] * 5
    assert pace.seconds_for(10) == pytest.approx(0.5)


def test_without_a_target_nothing_waits() -> None:
    pace = Pace(100, 0.0, lambda: 0.0)
    assert [pace.seconds_for(10) for _ in range(10)] == [0.0] * 10
    assert Pace(0, 5.0, lambda: 0.0).seconds_for(0) == 0


def test_the_target_is_most_of_the_slack_of_the_last_saves() -> None:
    slack = Slack()
    assert slack.seconds_to_spread() == 0, "nothing is known yet"
    for each in (100.0, 1.0, 2.0, 3.0, 4.0, 5.0):
        slack.add(each, has_waited=False)
    assert SAVES_MEASURED == 5
    assert slack.seconds_to_spread() == pytest.approx(SLACK_SHARE * 3.0)
    assert SLACK_SHARE < 1


def test_after_a_fence_that_had_to_wait_the_next_goes_at_full_speed() -> None:
    slack = Slack()
    slack.add(2.0, has_waited=True)
    assert slack.seconds_to_spread() == 0
    slack.add(2.0, has_waited=False)
    assert slack.seconds_to_spread() == pytest.approx(SLACK_SHARE * 2.0)


def test_a_forked_child_waits_for_no_copy() -> None:
    copying = CopyProgress(1, None)

    def child() -> None:
        with pytest.raises(StoreError, match="wait in that process"):
            copying.wait()

    assert forked(child) == 0
