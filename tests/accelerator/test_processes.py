"""Several processes and the device: who creates a context, forks, kills, and process groups."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardwise as sw
from tests.tools.agents import agents_below
from tests.tools.gang import Gang

ROOT = Path(__file__).parents[2]


def run_python(code: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


def uses_device(process: int) -> bool:
    """Return whether a process has opened a device of NVIDIA."""
    files = Path(f"/proc/{process}/fd")
    return any("nvidia" in os.readlink(each) for each in files.iterdir() if each.is_symlink())


IMPORT = """
import sys, torch
import shardwise as sw, shardwise.parts.cli, shardwise.data
sw.Checkpointer, sw.save, sw.load, sw.open, sw.export
assert not torch.cuda.is_initialized()
"""
ON_HOST = (
    IMPORT
    + """
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(3)).sum().backward()
optimizer.step()
state = {"model": model, "optimizer": optimizer, "rng": sw.RngState()}
sw.save(sys.argv[1] + "/a", state)
sw.load(sys.argv[1] + "/a", state)
with sw.Checkpointer(sys.argv[1] + "/run", memory=sw.Memory(dir=sys.argv[2])) as checkpointer:
    checkpointer.restore(state)
    checkpointer.save(1, state).result()
assert not torch.cuda.is_initialized(), "a context on the device was created"
"""
)
COMMAND = """
import sys, torch
from shardwise.parts.cli import main
sys.argv = ["shardwise", *sys.argv[1:]]
try:
    main()
except SystemExit as exit:
    assert not exit.code, exit.code
assert not torch.cuda.is_initialized()
"""


def test_imports_create_no_context() -> None:
    run_python(IMPORT)


def test_states_on_the_host_create_no_context(tmp_path: Path, shm: Path) -> None:
    run_python(ON_HOST, str(tmp_path), str(shm))


def test_commands_create_no_context(tmp_path: Path, cuda: torch.device) -> None:
    path = str(tmp_path / "a")
    sw.save(path, {"model": {"w": torch.randn(9, 9, device=cuda)}, "rng": sw.RngState()})
    out = str(tmp_path / "out")
    commands = ("inspect", path), ("verify", path), ("diff", path, path), ("export", path, out)
    for command in commands:
        run_python(COMMAND, *command)


def test_agents_do_not_open_the_device(
    tmp_path: Path, shm: Path, cuda: torch.device, spawned_agents: None
) -> None:
    state = {"x": torch.randn(1000, device=cuda)}
    with sw.Checkpointer(tmp_path / "run", memory=sw.Memory(dir=str(shm))) as checkpointer:
        checkpointer.prepare(state)
        handle = checkpointer.save(1, state)
        assert handle is not None
        handle.result()
        agents = [each["process"] for each in agents_below(shm)]
        assert agents
        assert uses_device(os.getpid())
        assert not any(map(uses_device, agents))


def test_a_forked_child_is_refused_and_the_parent_continues(
    tmp_path: Path, shm: Path, cuda: torch.device
) -> None:
    state = {"x": torch.zeros(1 << 22, device=cuda)}
    memory = sw.Memory(dir=str(shm), overlap=True)
    with sw.Checkpointer(tmp_path / "run", memory=memory) as checkpointer:
        checkpointer.prepare(state)
        for step in range(1, 4):
            state["x"].fill_(step)
            handle = checkpointer.save(step, state)
            child = os.fork()
            if not child:
                code = 3
                try:
                    checkpointer.save(step, state)
                except sw.ShardwiseError:
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitpid(child, 0)[1] == 0
            assert handle is not None
            saved = sw.open(handle.result().path)["x"].tensor()
            assert saved.min() == saved.max() == step


def test_workers_of_a_loader_beside_snapshots(
    tmp_path: Path, shm: Path, cuda: torch.device
) -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(64))
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, num_workers=2, pin_memory=True)
    total = torch.zeros((), device=cuda)
    memory = sw.Memory(dir=str(shm))
    with sw.Checkpointer(tmp_path / "run", memory=memory) as checkpointer:
        checkpointer.prepare({"total": total})
        for step, (batch,) in enumerate(loader, 1):
            total += batch.to(cuda, non_blocking=True).sum()
            checkpointer.save(step, {"total": total})
    assert sw.open(tmp_path / "run")["total"].tensor().item() == 64 * 63 / 2


def train_and_die(root: str, shm: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(300, 300, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    state = {"model": model, "optimizer": optimizer, "rank": torch.tensor([dist.get_rank()])}
    memory = sw.Memory(dir=shm, overlap=True, when_full="wait")
    checkpointer = sw.Checkpointer(root, save_every=1000, memory=memory)
    checkpointer.prepare(state)
    for step in range(1, 6):
        optimizer.zero_grad()
        model(torch.full((4, 300), 1.0 * step, device="cuda")).square().sum().backward()
        optimizer.step()
        handle = checkpointer.save(step, state)
    assert handle is not None
    handle.committed()
    torch.save(model.state_dict(), f"{root}.rank{dist.get_rank()}.pt")
    os.kill(os.getpid(), signal.SIGKILL)


def resume(root: str, shm: str) -> tuple[int, bool, str]:
    torch.manual_seed(1)
    model = nn.Linear(300, 300, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    state = {"model": model, "optimizer": optimizer, "rank": torch.tensor([0])}
    memory = sw.Memory(dir=shm, rescue=False)
    with sw.Checkpointer(root, save_every=1000, memory=memory) as checkpointer:
        step = checkpointer.restore(state)
        expected = torch.load(f"{root}.rank0.pt")
        same = all(torch.equal(v, expected[k]) for k, v in model.state_dict().items())
        return step or 0, same, str(checkpointer.last_restore)


@pytest.mark.parametrize("world", [1, 2])
def test_killed_trainers_resume_from_memory(
    gang: Gang, tmp_path: Path, shm: Path, world: int
) -> None:
    root = str(tmp_path / "run")
    outcomes = gang.run_outcomes(train_and_die, root, str(shm), world=world, timeout=100)
    assert [each.kind for each in outcomes] == ["died"] * world, outcomes[0].report
    for step, same, report in gang.run(resume, root, str(shm), world=world, timeout=100):
        assert (step, same) == (5, True), report


def compare_replicas(root: str, shm: str, flips: bool) -> list[list[str]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 64), nn.Linear(64, 5)).cuda()
    state = {"model": model}
    memory = sw.Memory(dir=shm, overlap=True, when_full="wait")
    found = []
    options: dict[str, Any] = {"save_every": 1000, "check_replicas_every": 2}
    with sw.Checkpointer(root, memory=memory, **options) as checkpointer:
        checkpointer.prepare(state)
        for step in range(1, 5):
            if step == 3 and flips and dist.get_rank() == 1:
                model[0].weight.data[7, 5] += 1
            handle = checkpointer.save(step, state)
            assert handle is not None
            handle.committed()
            found.append([each.tensor for each in checkpointer.divergences])
    return found


@pytest.mark.parametrize("flips", [False, True])
def test_replicas_on_the_device_are_compared(
    gang: Gang, tmp_path: Path, shm: Path, flips: bool
) -> None:
    for found in gang.run(compare_replicas, str(tmp_path / "run"), str(shm), flips, world=2):
        assert found[:3] == [[]] * 3
        assert found[3] == (["model.0.weight"] if flips else [])


def mesh_of_one_device() -> DeviceMesh:
    """A mesh of all ranks. Unless the device is in use, torch would give each rank another one."""
    torch.cuda.set_device(0)
    torch.cuda.init()
    return init_device_mesh("cuda", (dist.get_world_size(),))


def save_shards(path: str) -> None:
    mesh = mesh_of_one_device()
    whole = torch.arange(64 * 48, dtype=torch.float32, device="cuda").reshape(64, 48)
    rows = whole.chunk(dist.get_world_size())[dist.get_rank()].clone()
    state = {
        "rows": DTensor.from_local(rows, mesh, [Shard(0)], run_check=False),
        "same": DTensor.from_local(whole, mesh, [Replicate()], run_check=False),
    }
    sw.save(path, state, check_replicas=True)


def load_columns(path: str) -> bool:
    mesh = mesh_of_one_device()
    whole = torch.arange(64 * 48, dtype=torch.float32, device="cuda").reshape(64, 48)
    local = torch.zeros(64, 48 // dist.get_world_size(), device="cuda")
    columns = DTensor.from_local(local, mesh, [Shard(1)], run_check=False)
    sw.load(path, {"rows": columns}, strict=False)
    expected = whole.chunk(dist.get_world_size(), 1)[dist.get_rank()]
    return torch.equal(local, expected)


@pytest.mark.parametrize("worlds", [(2, 1), (1, 2), (2, 2)])
def test_shards_of_two_processes_on_one_device(
    gang: Gang, tmp_path: Path, worlds: tuple[int, int]
) -> None:
    gang.run(save_shards, str(tmp_path / "a"), world=worlds[0])
    assert all(gang.run(load_columns, str(tmp_path / "a"), world=worlds[1]))


def train_sharded(backend: str, directory: str, shm: str) -> tuple[list[float], list[float]]:
    """Train with FSDP2 in a process group of one rank; resume half-way with other objects."""
    dist.destroy_process_group()
    torch.cuda.set_device(0)
    dist.init_process_group(backend, init_method=f"file://{directory}/meet", rank=0, world_size=1)
    mesh = init_device_mesh("cuda", (1,))

    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}

    def step(state: dict[str, Any], number: int) -> float:
        torch.manual_seed(number)
        state["optimizer"].zero_grad()
        loss = state["model"](torch.randn(8, 32, device="cuda")).square().mean()
        loss.backward()
        state["optimizer"].step()
        return loss.item()

    state = make(1)
    memory = sw.Memory(dir=shm, overlap=True, when_full="wait")
    with sw.Checkpointer(f"{directory}/run", save_every=3, memory=memory) as checkpointer:
        assert checkpointer.restore(state) is None
        losses = []
        for number in range(1, 7):
            losses.append(step(state, number))
            if number <= 3:
                checkpointer.save(number, state)
    other = make(2)
    with sw.Checkpointer(f"{directory}/run", save_every=100, memory=memory) as checkpointer:
        assert checkpointer.restore(other) == 3
        again = [step(other, number) for number in range(4, 7)]
    dist.destroy_process_group()
    return losses[3:], again


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl", None])
def test_fsdp_in_a_process_group_of_the_device(
    gang: Gang, tmp_path: Path, shm: Path, backend: str
) -> None:
    (losses,) = gang.run(train_sharded, backend, str(tmp_path), str(shm), world=1, timeout=100)
    assert losses[0] == losses[1]


def save_collective(path: str) -> bool:
    from torch.distributed import _functional_collectives as functional

    torch.cuda.set_device(0)
    own = torch.full((1 << 20,), float(dist.get_rank() + 1), device="cuda")
    total = functional.all_reduce(own, "sum", dist.group.WORLD)
    sw.save(path, {"total": total})
    loaded = torch.zeros(1 << 20, device="cuda")
    sw.load(path, {"total": loaded})
    return bool((loaded == sum(range(1, dist.get_world_size() + 1))).all())


def test_a_collective_that_is_under_way(gang: Gang, tmp_path: Path) -> None:
    assert all(gang.run(save_collective, str(tmp_path / "a"), world=2))


def meet_with_nccl(directory: str, world: int) -> DeviceMesh:
    """Join a group of NCCL alone. It runs no collective, which NCCL refuses on a shared device."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    torch.cuda.set_device(0)
    torch.cuda.init()
    meet = f"file://{directory}/meet"
    dist.init_process_group("nccl", init_method=meet, rank=rank, world_size=world)
    return DeviceMesh("cuda", list(range(world)))


def save_with_nccl(directory: str, shm: str) -> list[bool]:
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = meet_with_nccl(directory, world)
    whole = torch.arange(144.0, device="cuda").reshape(12, 12)
    rows = whole.chunk(world)[rank].clone()
    state = {"x": DTensor.from_local(rows, mesh, [Shard(0)], run_check=False), "step": world}
    memory = sw.Memory(dir=shm, when_full="wait")
    with sw.Checkpointer(f"{directory}/run", save_every=2, memory=memory) as checkpointer:
        for step in range(1, 5):
            rows.copy_(whole.chunk(world)[rank] + step)
            checkpointer.save(step, state)
    local = torch.zeros(12, 12 // world, device="cuda")
    columns = {"x": DTensor.from_local(local, mesh, [Shard(1)], run_check=False), "step": 0}
    sw.load(f"{directory}/run", columns)
    from_disk = torch.equal(local, (whole + 4).chunk(world, 1)[rank]) and columns["step"] == world
    local.zero_()
    with sw.Checkpointer(f"{directory}/run", memory=memory) as checkpointer:
        step = checkpointer.restore(columns)
    from_memory = step == 4 and torch.equal(local, (whole + 4).chunk(world, 1)[rank])
    dist.destroy_process_group()
    return [from_disk, from_memory]


@pytest.mark.parametrize("world", [1, 2])
def test_saves_and_loads_of_a_group_of_nccl_alone(
    gang: Gang, tmp_path: Path, shm: Path, world: int
) -> None:
    found = gang.run(save_with_nccl, str(tmp_path), str(shm), world=world, timeout=100)
    assert found == [[True, True]] * world


def test_the_script_of_the_how_to_page_on_the_device(tmp_path: Path) -> None:
    page = (ROOT / "docs/howto/gpus.md").read_text()
    script = page.split('```python title="train.py"\n')[1].split("```")[0]
    script = script.replace("sw.Memory(", f"sw.Memory(dir={str(tmp_path / 'memory')!r}, ")
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1",
               "train.py", "--steps"]  # fmt: skip
    for steps in ("100", "120"):
        done = subprocess.run([*command, steps], cwd=tmp_path, capture_output=True, text=True,
                              timeout=110, check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
    assert "starts at step 100" in done.stdout
