"""`shardwise plan-interval`."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Run

MEASURED = ("--step-time", 10, "--snapshot-cost", 0.5, "--persist-cost", 5, "--nodes", 2048)
FAILURES = ("--failures-per-day", 7.76, "--memory-lost", 0.78)


def asked(*more: object) -> list[str]:
    return [str(word) for word in ("plan-interval", *MEASURED, *more)]


def test_the_document_has_the_plan(run: Run) -> None:
    ran = run(*asked(*FAILURES, "--memory-restore", 20, "--json"))
    assert ran.status == 0
    document = ran.document
    assert set(document) == {
        *("memory", "storage", "waste", "failures_per_day", "days_between_losses")
    }
    memory, storage = document["memory"], document["storage"]
    assert memory["seconds"] == memory["steps"] * 10 == pytest.approx(106, abs=5)
    assert memory["waste"]["restores"] == pytest.approx(7.76 * 20 / 86400, rel=0.01)
    assert storage["seconds"] == storage["steps"] * 10
    parts = [*memory["waste"].values(), *storage["waste"].values()]
    assert len(parts) == 6
    assert document["waste"] == pytest.approx(sum(parts))
    assert document["failures_per_day"] == pytest.approx(7.76)
    assert document["days_between_losses"] == pytest.approx(3.15 * 365.25, rel=0.01)


def test_people_are_told_what_to_write(run: Run) -> None:
    ran = run(*asked(*FAILURES))
    memory, checkpointer, *table = ran.out.splitlines()
    assert memory.split() in (
        ["sw.Memory(snapshot_every=10)", "every", "100", "s"],
        ["sw.Memory(snapshot_every=11)", "every", "110", "s"],
    )
    assert checkpointer.startswith("sw.Checkpointer(save_every=")
    lines = {line.split()[0]: line.split()[1:] for line in table if line}
    assert lines["memory"][2:] == ["0%", "0.95%"]
    assert set(lines) == {"wasted", "memory", "storage", "both", "On"}
    assert "in storage once in 3.1 years." in ran.out
    assert (ran.err, ran.status) == ("", 0)


def test_failures_of_a_node_are_those_of_the_cluster(run: Run) -> None:
    one = run(*asked("--failures-per-day", 8))
    assert one.status == 0
    assert run(*asked("--node-mtbf-days", 256)).out == one.out


@pytest.mark.parametrize(
    ("option", "default", "other"),
    [
        ("--group", 8, 4),
        ("--parity", 1, 2),
        ("--rebuild-minutes", 10, 60),
        ("--correlated-per-day", 0, 1),
        ("--memory-lost", 1, 0.5),
        ("--protect-time", 0, 3600),
        ("--memory-restore", 0, 60),
        ("--storage-restore", 0, 1e6),
    ],
)
def test_every_option_counts(run: Run, option: str, default: object, other: object) -> None:
    plain = run(*asked("--failures-per-day", 8))
    assert run(*asked("--failures-per-day", 8, option, default)).out == plain.out
    assert run(*asked("--failures-per-day", 8, option, other)).out != plain.out


def test_a_small_cluster_is_one_group(run: Run) -> None:
    small = ("--nodes", 4, "--failures-per-day", 1)
    assert run(*asked(*small, "--group", 4)).out == run(*asked(*small)).out


def test_much_waste_is_said_to_be_more(run: Run) -> None:
    ran = run(*asked("--failures-per-day", 10_000))
    assert "expect more waste" in ran.out
    assert ran.status == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "(neither given)"),
        (("--failures-per-day", 1, "--node-mtbf-days", 1), "(both given)"),
        (("--failures-per-day", 0), "rate of failures is 0: must be more than 0"),
        (("--failures-per-day", -1), "must be more than 0"),
        (("--node-mtbf-days", 0), "--node-mtbf-days 0: must be more than 0"),
        ((*FAILURES, "--snapshot-cost", -1), "cost of a snapshot is -1: must be 0 or more"),
        ((*FAILURES, "--step-time", "nan"), "time of a step is nan"),
        ((*FAILURES, "--group", 1), "cannot survive the loss of 1 of its nodes"),
        ((*FAILURES, "--nodes", 0), "number of nodes is 0: must be at least 1"),
        (("--failures-per-day", 1, "--parity", 0), "survives none of these failures"),
    ],
)
def test_wrong_input_is_refused(run: Run, more: tuple[object, ...], said: str) -> None:
    ran = run(*asked(*more))
    assert (ran.out, ran.status) == ("", 2)
    assert said in " ".join(ran.err.split())
