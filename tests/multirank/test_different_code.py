"""Ranks that run other code, or plan differently, never publish a checkpoint."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardwise as sw
from shardwise.kernel.engine import planning
from shardwise.kernel.plan.save import SavePlan, plan_save
from shardwise.testing.thread_group import ThreadGroup, run_ranks
from tests.conftest import SOURCES
from tests.tools.gang import Gang

SCRIPT = """
import sys, torch, torch.distributed as dist, shardwise as sw
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=2)
try:
    sw.save(path, {"w": torch.ones(4)})
    print("saved")
except sw.ShardwiseError as error:
    print(type(error).__name__, error)
"""


def test_ranks_with_other_code_of_the_same_version_are_refused(tmp_path: Path) -> None:
    copy = tmp_path / "other" / "shardwise"
    shutil.copytree(
        Path(SOURCES[0]) / "shardwise", copy, ignore=shutil.ignore_patterns("__pycache__")
    )
    changed = copy / "kernel" / "plan" / "save.py"
    changed.write_text(changed.read_text(encoding="utf-8") + "# a comment\n", encoding="utf-8")
    path = tmp_path / "step"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(path)],
            env={"PYTHONPATH": source, "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, source in enumerate([SOURCES[0], str(copy.parent)])
    ]
    for process in ranks:
        output, _ = process.communicate(timeout=120)
        assert re.search(
            "^RankError", output, re.MULTILINE
        )  # gloo of torch 2.9 prints lines before
        assert "install the same code on all hosts" in output
    assert not (path / "manifest.json").exists()


def state_of(rank: int) -> dict[str, Any]:
    """Tensors of equal sizes: replicated, split by rows, and in one rank's boxes."""
    state: dict[str, Any] = {f"w{i}": torch.full((4, 6), float(i)) for i in range(12)}
    for i in range(4):
        rows = torch.full((2, 6), float(10 * rank + i))
        state[f"rows{i}"] = sw.Shards(
            (4, 6), torch.float32, [(sw.Box((2 * rank, 0), (2, 6)), rows)]
        )
    return state


def swap_tensors(plan: SavePlan) -> SavePlan:
    """Swap the places of the first two tensors in the files of a group of ranks."""
    at = next(i for i, group in enumerate(plan.groups) if len(group.tensors) > 1)
    groups = [*plan.groups]
    tensors = groups[at].tensors.copy()
    tensors[:2] = tensors[:2][::-1]
    groups[at] = replace(groups[at], tensors=tensors)
    return replace(plan, groups=tuple(groups))


def swap_fragments(plan: SavePlan) -> SavePlan:
    """Swap what this rank copies, but not what it says."""
    fragment_at = dict(plan.fragment_at)
    at = next(i for i, group in enumerate(plan.groups) if plan.rank in group.ranks)
    group = plan.groups[at]
    box = tuple(group.box[group.ranks.tolist().index(plan.rank)].tolist())
    own = group.tensors[0], box
    other = next(key for key in fragment_at if key[0] != own[0])
    fragment_at[own], fragment_at[other] = fragment_at[other], fragment_at[own]
    return replace(plan, fragment_at=fragment_at)


def swap_writers(plan: SavePlan) -> SavePlan:
    groups = [replace(group, ranks=1 - group.ranks) for group in plan.groups]
    return replace(plan, groups=tuple(groups))


def forget_a_file(plan: SavePlan) -> SavePlan:
    return replace(plan, writers=plan.writers[:1])


def rename_a_tensor(plan: SavePlan) -> SavePlan:
    first, *others = plan.tensors
    return replace(plan, tensors=(type(first)("other", first.dtype, first.shape), *others))


def swap_layouts(plan: SavePlan) -> SavePlan:
    groups = [replace(group, starts=group.starts[:, ::-1].copy()) for group in plan.groups]
    return replace(plan, groups=tuple(groups))


def save_with_a_wrong_plan(
    path: str, wrong_rank: int, change: Callable[[SavePlan], SavePlan]
) -> str:
    def plan_wrongly(*args: Any) -> SavePlan:
        plan = plan_save(*args)
        return change(plan) if plan.rank == wrong_rank else plan

    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    sharded = {
        f"sharded{i}": distribute_tensor(torch.full((8, 6), float(i)), mesh, [Shard(0)])
        for i in range(3)
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "plan_save", plan_wrongly)
        try:
            sw.save(path, {**state_of(rank), **sharded})
        except sw.ShardwiseError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("wrong_rank", [0, 1])
@pytest.mark.parametrize(
    "change",
    [swap_tensors, swap_fragments, swap_writers, forget_a_file, rename_a_tensor, swap_layouts],
)
def test_ranks_that_plan_differently_publish_nothing(
    gang: Gang, tmp_path: Path, change: Callable[[SavePlan], SavePlan], wrong_rank: int
) -> None:
    path = tmp_path / "step"
    errors = gang.run(save_with_a_wrong_plan, str(path), wrong_rank, change, world=2)
    for rank, error in enumerate(errors):
        assert "This is a bug of shardwise" in error, (rank, error)
    assert not (path / "manifest.json").exists()
    errors = gang.run(save_with_a_wrong_plan, str(path), 2, change, world=2)
    assert errors == ["", ""]
    sw.open(path).verify()


def test_a_plan_of_other_ranks_is_not_reused_from_the_cache(tmp_path: Path) -> None:
    """Each rank has planned alone; the caches are shared, and the plans differ."""
    caches = [sw.Checkpointer(tmp_path / f"{rank}", memory=None) for rank in range(2)]

    def save(group: ThreadGroup) -> sw.SaveReport:
        cache = caches[group.rank].plan_cache
        sw.save(tmp_path / "a", state_of(group.rank), group=group, plan_cache=cache)
        return sw.save(tmp_path / "b", state_of(group.rank), group=group, plan_cache=cache)

    assert [each.plan_cached for each in run_ranks(2, save)] == [True, True]
    for each in caches:
        each.close()
