"""Replicas that differ are found at the next comparison and named; equal ones never are."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.kernel.errors import MismatchError
from tests.breadth import mostly_long
from tests.memory.test_snapshots import memory_of, shm
from tests.tools.gang import Gang

__all__ = ["shm"]

FLIPPED_AT = 3
Report = tuple[int | None, str, list[sw.Box], tuple[int, ...]]


def trained_state() -> dict[str, Any]:
    """A model after a step of AdamW, and a master copy of it: the same on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 64), nn.Linear(64, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 33)).sum().backward()
    optimizer.step()
    master = {name: each.detach().double() for name, each in model.named_parameters()}
    return {"model": model, "optimizer": optimizer, "master": master}


def flip_bit(state: dict[str, Any], kind: str) -> str:
    """Flip the lowest bit of an element, and return the name of the tensor."""
    weight = state["model"][0].weight
    tensors = {
        "model.0.weight": weight.detach(),
        "optimizer.0.weight.exp_avg": state["optimizer"].state[weight]["exp_avg"],
        "master.0.weight": state["master"]["0.weight"],
    }
    name = next(each for each in tensors if each.startswith(kind))
    flat = tensors[name].view(-1).view(torch.uint8)
    flat[1001 * tensors[name].element_size()] ^= 1
    return name


def save_with_flip(root: str, shm: str, kind: str, every: int, sync: bool) -> list[Report]:
    """Save seven steps; rank 1 flips a bit before step 3. The reports after each save."""
    state = trained_state()
    memory = None if sync else memory_of(shm, 1)
    reports: list[Report] = []
    options: dict[str, Any] = {"keep": sw.Keep(last=1), "check_replicas_every": every}
    with sw.Checkpointer(root, save_every=1 if sync else 1000, memory=memory, **options) as cp:
        for step in range(1, 8):
            if step == FLIPPED_AT and dist.get_rank() == 1:
                flip_bit(state, kind)
            cp.save(step, state)
            reports += [(e.step, e.tensor, list(e.boxes), e.minority) for e in cp.divergences]
    return reports


@pytest.mark.parametrize(
    ("kind", "world", "every", "sync", "steps"),
    [
        ("model", 2, 1, True, [3, 4, 5, 6, 7]),
        ("optimizer", 3, 2, False, [4, 4, 6, 6]),
        ("master", 3, 5, False, [5, 5, 5]),
    ],
)
def test_one_flipped_bit_is_found_at_the_next_check_and_named(
    gang: Gang, tmp_path: Path, shm: Path, kind: str, world: int, every: int, sync: bool,
    steps: list[int],
) -> None:  # fmt: skip
    """`divergences` keeps what the last comparison found."""
    args = str(tmp_path / "root"), str(shm), kind, every, sync
    reports = gang.run(save_with_flip, *args, world=world)
    assert reports == [reports[0]] * world
    name, box = flip_bit(trained_state(), kind), sw.Box((0, 0), (64, 33))
    minority = (1,) if world == 3 else ()
    assert reports[0] == [(step, name, [box], minority) for step in steps]


def harmless_state(step: int) -> dict[str, Any]:
    """Equal replicas of all kinds, and what differs between ranks on purpose."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(step)
    nans = torch.randint(-(1 << 31), 1 << 31, (70, 41)).to(torch.int32)
    nans[:35] |= 0x7F800000  # NaNs of many kinds
    sizes = [3 + 2 * i for i in range(world)]
    start = sum(sizes[:rank])
    uneven = sw.Box((start, 0), (sizes[rank], 9))
    rows = 8 // min(2, world)
    half = sw.Box((rank * rows % 8, 0), (rows, 300))  # every other rank holds the same
    strided = torch.randn(60, 50).t()[::2]
    return {
        "nans": nans.view(torch.float32),
        "zeros": torch.tensor([0.0, -0.0] * 500).bfloat16(),
        "strided": strided if rank % 2 else strided.contiguous(),
        "empty": torch.empty(0, 7),
        "scalar": torch.tensor(float(step)),
        "mine": sw.PerRank(rank),
        "rng": sw.RngState(),
        "uneven": sw.Shards(
            (sum(sizes), 9), torch.float32, [(uneven, torch.full((sizes[rank], 9), float(rank)))]
        ),
        "hybrid": sw.Shards((8, 300), torch.float32, [(half, torch.full((rows, 300), 1.0 * step))]),
        "changed": torch.full((5000,), float(step)),
    }


@contextmanager
def logged_differences() -> Iterator[list[str]]:
    """Collect the warnings of replicas that differ while the block runs."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.addFilter(lambda record: "replicas differ" in record.getMessage())
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwise").addHandler(handler)
    try:
        yield logged
    finally:
        logging.getLogger("shardwise").removeHandler(handler)


def save_harmless(root: str, shm: str, overlap: bool) -> list[str]:
    """Save replicas that are equal at each save, and differ as soon as they may; the warnings."""
    options: dict[str, Any] = {"on_divergence": "raise", "check_replicas_every": 1}
    memory = memory_of(shm, 1, overlap=overlap)
    with (
        logged_differences() as logged,
        sw.Checkpointer(root, save_every=1000, memory=memory, **options) as cp,
    ):
        for step in range(1, 6):
            state = harmless_state(step)
            handle = cp.save(step, state)
            assert handle is not None
            if overlap:
                handle.staged()
            state["changed"].fill_(-1.0 - dist.get_rank())
            assert cp.divergences == ()
        cp.save(step + 1, harmless_state(step))
    return logged


@pytest.mark.parametrize(
    ("world", "overlap"), mostly_long([(1, False), (2, True), (4, False)], [(2, True)])
)
def test_equal_replicas_are_never_reported(
    gang: Gang, tmp_path: Path, shm: Path, world: int, overlap: bool
) -> None:
    root = str(tmp_path / "root")
    assert gang.run(save_harmless, root, str(shm), overlap, world=world) == [[]] * world


def train_with_ddp(
    root: str, shm: str, on_divergence: dict[str, str] | str
) -> tuple[list[str], str, int]:
    """Train on other batches on each rank.

    Returns:
        The tensors that were found to differ, an error, and the number of warnings.
    """
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    model = nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    torch.manual_seed(dist.get_rank())
    found: set[str] = set()
    options: Any = {"on_divergence": on_divergence, "check_replicas_every": 2}
    with logged_differences() as logged:
        try:
            with sw.Checkpointer(root, save_every=1000, memory=memory_of(shm, 1), **options) as cp:
                for step in range(1, 8):
                    model(torch.randn(4, 8)).square().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    cp.save(step, state)
                    found |= {each.tensor for each in cp.divergences}
        except MismatchError as error:
            return sorted(found), str(error), len(logged)
    return sorted(found), "", len(logged)


def test_in_a_training_with_ddp_only_statistics_of_batches_differ(
    gang: Gang, tmp_path: Path, shm: Path
) -> None:
    """What differed at the last comparison too is not logged again."""
    statistics = ["model.1.running_mean", "model.1.running_var"]
    found = gang.run(train_with_ddp, str(tmp_path / "a"), str(shm), "warn", world=2)
    assert found == [(statistics, "", 1), (statistics, "", 0)]
    rules = {"*.running_*": "ignore", "*": "raise"}
    found = gang.run(train_with_ddp, str(tmp_path / "b"), str(shm), rules, world=2)
    assert found == [([], "", 0)] * 2


def save_seeds(root: str, shm: str, options: dict[str, Any], saves: int) -> tuple[list[str], int]:
    """Save tensors of another seed on rank 2. Return the error of each save, and the warnings."""
    torch.manual_seed(dist.get_rank() // 2)
    state = {"a": torch.randn(400, 50), "b": {"running_mean": torch.randn(3000)}}
    errors: list[str] = []
    with (
        logged_differences() as logged,
        sw.Checkpointer(root, save_every=1000, memory=memory_of(shm, 1), **options) as cp,
    ):
        for step in range(1, saves + 1):
            errors.append("")
            try:
                cp.save(step, state)
            except MismatchError as error:
                errors[-1] = str(error)
    return errors, len(logged)


def test_nothing_is_saved_and_the_next_save_compares_again(
    gang: Gang, tmp_path: Path, shm: Path
) -> None:
    options = {"on_divergence": {"*.running_*": "ignore", "*": "raise"}, "check_replicas_every": 2}
    found = gang.run(save_seeds, str(tmp_path / "root"), str(shm), options, 4, world=3)
    assert found == [found[0]] * 3
    errors, _ = found[0]
    assert [bool(each) for each in errors] == [False, True, True, True]
    assert "replicas differ at step 2" in errors[1]
    assert "  - a[0:400,0:50]: rank 2 differs from ranks 0, 1" in errors[1]
    assert "running_mean" not in errors[1]


def test_what_is_ignored_is_not_compared(gang: Gang, tmp_path: Path, shm: Path) -> None:
    options = {"on_divergence": "ignore", "check_replicas_every": 1}
    found = gang.run(save_seeds, str(tmp_path / "root"), str(shm), options, 3, world=3)
    assert found == [(["", "", ""], 0)] * 3


def test_by_default_the_first_save_compares(gang: Gang, tmp_path: Path, shm: Path) -> None:
    found = gang.run(save_seeds, str(tmp_path / "root"), str(shm), {}, 3, world=3)
    assert found == [(["", "", ""], 1), (["", "", ""], 0), (["", "", ""], 0)]


def restore_and_flip(root: str, shm: str) -> tuple[int | None, list[str]]:
    """Continue on other ranks, and flip a bit. Return the restored step, and the warnings."""
    state = trained_state()
    options: Any = {"check_replicas_every": 1, "save_every": 1000}
    with (
        logged_differences() as logged,
        sw.Checkpointer(root, memory=memory_of(shm, 1), **options) as cp,
    ):
        restored = cp.restore(state)
        cp.save(6, state)
        if dist.get_rank() == 0:
            flip_bit(state, "model")
        cp.save(7, state)
    return restored, logged


def test_other_ranks_continue(gang: Gang, tmp_path: Path, shm: Path) -> None:
    """The warning says when the replicas were last equal."""
    root = str(tmp_path / "root")
    gang.run(save_five, root, str(shm), world=3)
    found = gang.run(restore_and_flip, root, str(shm), world=2)
    assert found[1] == (5, [])
    restored, (warning,) = found[0]
    assert restored == 5
    assert "replicas differ at step 7" in warning
    assert "; they were equal at step 6" in warning
    assert "model.0.weight[0:64,0:33]: rank 0 and rank 1 differ" in warning


def save_five(root: str, shm: str) -> None:
    with sw.Checkpointer(root, save_every=5, memory=memory_of(shm, 1)) as cp:
        for step in range(1, 6):
            cp.save(step, trained_state())
