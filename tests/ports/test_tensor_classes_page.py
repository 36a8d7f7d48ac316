"""The package that docs/ports/tensor_classes.md shows, as a stranger would install it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise as sw
from tests.breadth import mostly_long
from tests.docs.blocks import blocks_of, check_syntax

SOURCE = Path(sw.__file__).parents[1]
HEAD = """
import sys, torch, shardwise as sw, rowquant
from torch import nn

def holder(seed, offset=0):
    torch.manual_seed(seed)
    model = nn.Module()
    model.weight = nn.Parameter(rowquant.quantize(torch.randn(6, 4), offset), requires_grad=False)
    return model
"""
ONE = (
    HEAD
    + """
saved, live = holder(0), holder(1)
sw.save("c", {"model": saved})
print(sorted(sw.open("c").tensors()))
sw.load("c", {"model": live})
a, b = saved.weight, live.weight
print(torch.equal(a.codes, b.codes), torch.equal(a.scale, b.scale))
try:
    sw.load("c", {"model": holder(1, offset=3)})
except sw.MismatchError as error:
    print(str(error).splitlines()[-1])
"""
)
PICKLED = (
    HEAD
    + """
saved, live = holder(0), holder(1)
torch.save({"model": saved.state_dict()}, "file.pt")
try:
    sw.load("file.pt", {"model": live})
    print(torch.equal(saved.weight.codes, live.weight.codes))
    sw.load("file.pt", {"model": holder(1, offset=3)})
except sw.MismatchError as error:
    print(str(error).splitlines()[-1])
except sw.FormatError as error:
    print("rowquant.RowQuantized (at model.weight)" in str(error))
    print([*sw.open("file.pt", skip_unknown=True)])
"""
)
SHARDED = (
    HEAD
    + """
import os
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

def shard(seed):
    dim = int(sys.argv[2])
    whole = holder(seed).weight.data
    n = whole.shape[dim] // world
    codes = whole.codes.narrow(dim, n * rank, n).clone()
    scale = whole.scale.narrow(0, n * rank, n).clone() if dim == 0 else whole.scale + rank
    local = rowquant.RowQuantized(codes, scale, 0)
    meta = TensorMeta(whole.shape, (4, 1), whole.dtype)
    spec = DTensorSpec(init_device_mesh("cpu", (world,)), (Shard(dim),), meta)
    return DTensor(local, spec, requires_grad=False)

if sys.argv[1] == "save":
    sw.save("c", {"w": shard(0)})
else:
    live, expected = shard(1), shard(0)
    try:
        sw.load("c", {"w": live})
        same = torch.equal(live._local_tensor.scale, expected._local_tensor.scale)
        found = str(same and torch.equal(live._local_tensor.codes, expected._local_tensor.codes))
    except sw.MismatchError as error:
        found = f"refused: {'w.scale' in str(error)}"
    print(found + chr(10), end="")
dist.destroy_process_group()
"""
)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with the package, and the metadata that an installation makes of its entry point."""
    blocks = {block.title: block for block in blocks_of("ports/tensor_classes.md")}
    for title, block in blocks.items():
        check_syntax(block)
        if title.endswith(".py"):
            (tmp_path / title).parent.mkdir(exist_ok=True)
            (tmp_path / title).write_text(block.text)
    metadata = tmp_path / "rowquant-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rowquant\nVersion: 1.0\n")
    entry = blocks["pyproject.toml"].text.splitlines()[1].replace('"', "")
    (metadata / "entry_points.txt").write_text(f"[shardwise.tensor_classes]\n{entry}\n")
    return tmp_path


def run(folder: Path, *command: str, **environ: str) -> list[str]:
    path = f"{folder}{os.pathsep}{SOURCE}"
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **environ},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("plugins", ["", "off"])
def test_it_comes_back_with_and_without_the_rule(package: Path, plugins: str) -> None:
    assert run(package, "-c", ONE, SHARDWISE_PLUGINS=plugins) == [
        "['model.weight.codes', 'model.weight.scale']",
        "True True",
        "  - model.weight.context.offset: 0 in the checkpoint, 3 in the target",
    ]


@pytest.mark.parametrize(
    ("plugins", "expected"),
    [
        ("", ["True", "  - model.weight.context.offset: 0 in the checkpoint, 3 in the target"]),
        ("off", ["True", "[]"]),
    ],
)
def test_a_file_of_torch_save_is_read_with_the_rule(
    package: Path, plugins: str, expected: list[str]
) -> None:
    assert run(package, "-c", PICKLED, SHARDWISE_PLUGINS=plugins) == expected


@pytest.mark.parametrize(
    ("plugins", "dim", "ranks", "expected"),
    mostly_long(
        [
            ("", 0, 3, "True"),
            ("", 1, 2, "True"),
            ("", 1, 1, "refused: True"),  # each rank has a scale for its own part of each row
            ("off", 0, 2, "True"),
            ("off", 0, 3, "refused: True"),
        ],
        [("", 0, 3, "True")],
    ),
)
def test_the_rule_allows_other_shardings(
    package: Path, plugins: str, dim: int, ranks: int, expected: str
) -> None:
    (package / "sharded.py").write_text(SHARDED)
    launch = ("-m", "torch.distributed.run", "--standalone")
    environ = {"SHARDWISE_PLUGINS": plugins}
    run(package, *launch, "--nproc-per-node=2", "sharded.py", "save", str(dim), **environ)
    command = (*launch, f"--nproc-per-node={ranks}", "sharded.py", "load", str(dim))
    printed = run(package, *command, **environ)
    assert printed == [expected] * ranks
