"""`shardwise plan-memory`: its numbers are those of a real run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.cli.plan_memory import estimate_memory
from shardwise.testing import Gang
from tests.cli.conftest import Run

LLAMA = ("--parameters", 8_030_261_248)
MEBIBYTE = 1 << 20


def test_the_document_has_the_plan(run: Run) -> None:
    ran = run("plan-memory", *LLAMA, "--nodes", 4, "--ranks-per-node", 8, "--copies", 1, "--json")
    document = ran.document
    assert ran.status == 0
    assert document["state"] == 8_030_261_248 * 12
    assert document["saved_by_node"] == document["state"] // 4
    assert document["slots"] == pytest.approx(3 * document["saved_by_node"], rel=0.002)
    assert document["for_others"] == pytest.approx(2 * document["saved_by_node"], rel=0.002)
    assert document["total"] == document["slots"] + document["for_others"]
    assert document["shm_size"] == pytest.approx(1.1 * document["total"], rel=0.01)


def test_people_are_told_what_to_pass(run: Run) -> None:
    ran = run("plan-memory", *LLAMA, "--nodes", 4, "--parity", 1)
    planned = run("plan-memory", *LLAMA, "--nodes", 4, "--parity", 1, "--json").document
    size = planned["shm_size"] // 2**30
    for line in (f"--shm-size={size}g", f"sizeLimit: {size}Gi", f"remount,size={size}g"):
        assert line in ran.out
    assert (ran.err, ran.status) == ("", 0)


@pytest.mark.parametrize(
    ("option", "default", "other"),
    [
        ("--bytes-per-parameter", 12, 14),
        ("--nodes", 1, 2),
        ("--ranks-per-node", 8, 4),
        ("--slots", 2, 1),
    ],
)
def test_every_option_counts(run: Run, option: str, default: object, other: object) -> None:
    plain = run("plan-memory", *LLAMA)
    assert run("plan-memory", *LLAMA, option, default).out == plain.out
    assert run("plan-memory", *LLAMA, option, other).out != plain.out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "(neither given)"),
        ((*LLAMA, "--state-bytes", 1), "(both given)"),
        (("--parameters", "nan"), "a state of nan bytes"),
        (("--parameters", 0), "all must be at least 1"),
        ((*LLAMA, "--nodes", 0), "all must be at least 1"),
        ((*LLAMA, "--copies", 1, "--parity", 1), "use one of them, not both"),
        ((*LLAMA, "--slots", 0), "Memory(slots=0"),
        ((*LLAMA, "--slots", 1, "--copies", 1), "need slots=2 or more"),
    ],
)
def test_wrong_input_is_refused(run: Run, args: tuple[object, ...], said: str) -> None:
    ran = run("plan-memory", *args)
    assert (ran.out, ran.status) == ("", 2)
    assert said in " ".join(ran.err.split())


def prepare(root: Path, directory: Path) -> int:
    """Allocate the slots of a rank for 32 MiB that two ranks hold, and return their bytes."""
    state = {"t": torch.zeros(32 * MEBIBYTE // 4)}
    checkpointer = sw.Checkpointer(root, memory=sw.Memory(slots=1, dir=str(directory)))
    allocated = checkpointer.prepare(state)
    checkpointer.close(wait=False)
    return allocated


def test_a_run_allocates_what_was_planned(gang: Gang, tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    allocated = gang.run(prepare, tmp_path / "root", tmp_path / "node", world=2)
    memory = sw.Memory(slots=1)
    planned = estimate_memory(32 * MEBIBYTE, memory, nodes=1, ranks_per_node=2)
    assert sum(allocated) == pytest.approx(planned.slots, rel=0.001)
