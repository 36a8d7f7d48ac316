"""Replicas that differ: found within a round of saves and named; equal replicas never reported."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.errors import MismatchError
from tests.memory.test_snapshots import memory_of, shm
from tests.tools.gang import Gang

__all__ = ["shm"]

FLIPPED_AT = 3
SAVES = 20  # of each replica, until all of its bytes were compared
Report = tuple[int, int | None, str, list[sw.Box], tuple[int, ...]]


def trained_state() -> dict[str, Any]:
    """A model after a step of AdamW, and a master copy of it: the same on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 64), nn.Linear(64, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 33)).sum().backward()
    optimizer.step()
    master = {name: each.detach().double() for name, each in model.named_parameters()}
    return {"model": model, "optimizer": optimizer, "master": master}


def flip_bit(state: dict[str, Any], kind: str) -> tuple[str, tuple[int, ...]]:
    """Flip the lowest bit of an element; the tensor's name and the element's index."""
    weight = state["model"][0].weight
    tensors = {
        "model.0.weight": weight.detach(),
        "optimizer.0.weight.exp_avg": state["optimizer"].state[weight]["exp_avg"],
        "master.0.weight": state["master"]["0.weight"],
    }
    name = next(each for each in tensors if each.startswith(kind))
    flat = tensors[name].view(-1).view(torch.uint8)
    flat[1001 * tensors[name].element_size()] ^= 1
    return name, divmod(1001, 33)


def reports_of(cp: sw.Checkpointer) -> list[Report]:
    return [(e.step, e.equal_at, e.tensor, list(e.boxes), e.minority) for e in cp.divergences]


def save_with_flip(root: str, shm: str, kind: str, rank: int, sync: bool) -> list[Report]:
    """Save again and again until a difference is found; what all ranks know of it."""
    state = trained_state()
    memory = None if sync else memory_of(shm, 1)
    every = 1 if sync else 1000
    with sw.Checkpointer(root, save_every=every, memory=memory, keep=sw.Keep(last=1)) as cp:
        for step in range(1, FLIPPED_AT + SAVES * dist.get_world_size() + 1):
            if step == FLIPPED_AT and dist.get_rank() == rank:
                flip_bit(state, kind)
            cp.save(step, state)
            if cp.divergences:
                return reports_of(cp)
    return []


@pytest.mark.parametrize(
    ("kind", "world", "sync"),
    [
        ("model", 2, True),
        ("optimizer", 3, False),
        pytest.param("optimizer", 2, True, marks=pytest.mark.long),
        ("master", 3, False),
    ],
)
def test_one_flipped_bit_is_found_and_named(
    gang: Gang, tmp_path: Path, shm: Path, kind: str, world: int, sync: bool
) -> None:
    root = str(tmp_path / "root")
    reports = gang.run(save_with_flip, root, str(shm), kind, 1, sync, world=world)
    assert reports == [reports[0]] * world
    ((step, equal_at, tensor, boxes, minority),) = reports[0]
    name, element = flip_bit(trained_state(), kind)
    assert tensor == name
    assert len(boxes) == 1
    assert all(
        low <= i < high
        for low, i, high in zip(boxes[0].offset, element, boxes[0].stop, strict=True)
    )
    assert boxes[0].size < 33 * 64, "a part of the tensor"
    assert FLIPPED_AT <= step < FLIPPED_AT + SAVES * world
    assert equal_at == (step - SAVES * world if step > SAVES * world else None)
    assert minority == ((1,) if world == 3 else ())


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
    return {
        "nans": nans.view(torch.float32),
        "zeros": torch.tensor([0.0, -0.0] * 500).bfloat16(),
        "strided": torch.randn(60, 50).t()[::2],
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


def save_harmless(root: str, shm: str, overlap: bool) -> list[str]:
    """Save replicas that are equal at each save, and differ as soon as they may; the warnings."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwise").addHandler(handler)
    world = dist.get_world_size()
    try:
        memory = memory_of(shm, 1, overlap=overlap)
        with sw.Checkpointer(root, save_every=1000, memory=memory, on_divergence="raise") as cp:
            for step in range(1, SAVES * world + 2):
                state = harmless_state(step)
                handle = cp.save(step, state)
                assert handle is not None
                if overlap:
                    handle.staged()
                state["changed"].fill_(-1.0 - dist.get_rank())
                assert cp.divergences == ()
            cp.save(step + 1, harmless_state(step))
    finally:
        logging.getLogger("shardwise").removeHandler(handler)
    return [each for each in logged if "replicas" in each]


@pytest.mark.parametrize(("world", "overlap"), [(1, False), (2, True), (4, False)])
def test_equal_replicas_are_never_reported(
    gang: Gang, tmp_path: Path, shm: Path, world: int, overlap: bool
) -> None:
    root = str(tmp_path / "root")
    assert gang.run(save_harmless, root, str(shm), overlap, world=world) == [[]] * world


def train_with_ddp(
    root: str, shm: str, on_divergence: dict[str, str] | str
) -> tuple[list[str], str]:
    """Train on other batches on each rank; the tensors that were found to differ, and an error."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    model = nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    torch.manual_seed(dist.get_rank())
    found: set[str] = set()
    options: Any = {"on_divergence": on_divergence, "save_every": 1000}
    try:
        with sw.Checkpointer(root, memory=memory_of(shm, 1), **options) as cp:
            for step in range(1, SAVES * dist.get_world_size() + 3):
                model(torch.randn(4, 8)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                cp.save(step, state)
                found |= {each.tensor for each in cp.divergences}
    except MismatchError as error:
        return sorted(found), str(error)
    return sorted(found), ""


def test_in_a_training_with_ddp_only_statistics_of_batches_differ(
    gang: Gang, tmp_path: Path, shm: Path
) -> None:
    root = str(tmp_path / "root")
    statistics = ["model.1.running_mean", "model.1.running_var"]
    assert gang.run(train_with_ddp, root, str(shm), "warn", world=2) == [(statistics, "")] * 2
    rules = {"*.running_*": "ignore", "*": "raise"}
    root = str(tmp_path / "again")
    assert gang.run(train_with_ddp, root, str(shm), rules, world=2) == [([], "")] * 2


def save_seeds(
    root: str, shm: str, options: dict[str, Any], saves: int
) -> tuple[str, int, int, int]:
    """Save tensors of another seed on rank 2.

    Returns:
        The error, the saves that returned, the warnings, and the events of differences.
    """
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwise").addHandler(handler)
    torch.manual_seed(dist.get_rank() // 2)
    state = {"a": torch.randn(400, 50), "b": {"running_mean": torch.randn(3000)}}
    error, returned = "", 0
    events: list[str] = []
    options |= {"on_event": lambda event: events.append(event.stage), "save_every": 1000}
    try:
        with sw.Checkpointer(root, memory=memory_of(shm, 1), **options) as cp:
            for step in range(1, saves + 1):
                cp.save(step, state)
                returned += 1
    except MismatchError as raised:
        error = str(raised)
    finally:
        logging.getLogger("shardwise").removeHandler(handler)
    warned = sum("replicas differ" in each for each in logged)
    return error, returned, warned, events.count("divergence")


def test_an_error_is_raised_at_the_next_save_on_all_ranks(
    gang: Gang, tmp_path: Path, shm: Path
) -> None:
    options = {"on_divergence": "raise"}
    found = gang.run(save_seeds, str(tmp_path / "root"), str(shm), options, 9, world=3)
    assert found == [found[0]] * 3
    error, *counts = found[0]
    assert counts == [1, 0, 1]
    assert "replicas differ at step 1" in error
    assert ": rank 2 differs from ranks 0, 1" in error


def test_the_last_save_is_compared_at_the_end(gang: Gang, tmp_path: Path, shm: Path) -> None:
    options = {"on_divergence": {"*.running_*": "ignore", "*": "raise"}}
    found = gang.run(save_seeds, str(tmp_path / "root"), str(shm), options, 1, world=3)
    error, returned, _, _ = found[0]
    assert found == [found[0]] * 3
    assert returned == 1
    assert "  - a[" in error
    assert "running_mean" not in error
    with_checkpoint = sw.open(tmp_path / "root")
    assert with_checkpoint.step == 1, "the last step is saved before the error is raised"


def test_each_tensor_is_logged_once_in_a_round_on_rank_0(
    gang: Gang, tmp_path: Path, shm: Path
) -> None:
    found = gang.run(save_seeds, str(tmp_path / "root"), str(shm), {}, 12, world=3)
    assert [(error, returned, events) for error, returned, _, events in found] == [("", 12, 12)] * 3
    assert [warned for _, _, warned, _ in found][1:] == [0, 0]
    assert 1 <= found[0][2] <= 2, "both tensors, at one save or at two"


def test_what_is_ignored_is_not_compared(gang: Gang, tmp_path: Path, shm: Path) -> None:
    options = {"on_divergence": "ignore"}
    found = gang.run(save_seeds, str(tmp_path / "root"), str(shm), options, 3, world=3)
    assert found == [("", 3, 0, 0)] * 3


def restore_and_flip(root: str, shm: str) -> tuple[int | None, int, list[Report]]:
    """Continue on other ranks; saves without a report, and the report after a flip."""
    state = trained_state()
    saves = SAVES * dist.get_world_size()
    quiet = 0
    with sw.Checkpointer(root, save_every=1000, memory=memory_of(shm, 1)) as cp:
        step = restored = cp.restore(state)
        for _ in range(saves + 1):
            step = (step or 0) + 1
            cp.save(step, state)
            quiet += not cp.divergences
        if dist.get_rank() == 0:
            flip_bit(state, "model")
        for _ in range(saves + 1):
            step = (step or 0) + 1
            cp.save(step, state)
            if cp.divergences:
                return restored, quiet, reports_of(cp)
    return restored, quiet, []


def test_another_number_of_ranks_begins_anew(gang: Gang, tmp_path: Path, shm: Path) -> None:
    """The report says when the same boxes were last equal: a round before."""
    root = str(tmp_path / "root")
    gang.run(save_harmless_state, root, str(shm), world=3)
    found = gang.run(restore_and_flip, root, str(shm), world=2)
    saves = SAVES * 2
    assert found == [found[0]] * 2
    restored, quiet, ((step, equal_at, tensor, _, minority),) = found[0]
    assert restored == 5
    assert quiet == saves + 1
    assert tensor == "model.0.weight"
    assert minority == ()
    assert equal_at == step - saves


def save_harmless_state(root: str, shm: str) -> None:
    with sw.Checkpointer(root, save_every=5, memory=memory_of(shm, 1)) as cp:
        for step in range(1, 6):
            cp.save(step, trained_state())


def count_bytes(root: str, shm: str) -> tuple[int, int]:
    """The bytes that this rank writes at a save, and the bytes that it compares."""
    state = {f"w{i}": torch.randn(300, 1000) for i in range(8)}
    events: list[sw.events.Event] = []
    with sw.Checkpointer(root, memory=None, on_event=events.append) as cp:
        handle = cp.save(1, state)
        assert handle is not None
        written = handle.result().bytes_written
    return written, sum(e.bytes for e in events if e.stage == "compare_replicas")


def test_a_save_compares_a_twentieth_of_what_it_writes(gang: Gang, tmp_path: Path) -> None:
    for written, compared in gang.run(count_bytes, str(tmp_path), "", world=2):
        assert math.isclose(compared / written, 1 / 20, rel_tol=0.15)
