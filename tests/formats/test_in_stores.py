"""Layout checkpoints in an object store are read in place: all values, in few requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import shardwise as sw
from shardwise.kernel.engine.buffers import aligned_buffer
from shardwise.kernel.store import LocalStore, Store, open_store, store_below
from shardwise.parts.stores.object_store import ObjectReader
from tests.breadth import mostly_long
from tests.formats.foreign_goldens import unpacked
from tests.formats.test_torchranks import save as save_ranks
from tests.formats.test_trainers import assert_loads, lightning_state, trained
from tests.store.servers import Server, moto, s3_client  # noqa: F401 - a fixture
from tests.tools.gang import Gang

LARGE = 1 << 20


def upload(source: Path, target: Store) -> None:
    """Copy all files of a directory into a store."""
    for name in LocalStore(source).walk(10_000):
        data = (source / name).read_bytes()
        folder, _, key = name.rpartition("/")
        file = (store_below(target, folder) if folder else target).create(key, len(data))
        buffer = aligned_buffer(len(data))
        buffer[:] = np.frombuffer(data, np.uint8)
        if data:
            file.write_at(0, buffer)
        file.commit()
        file.close()


def require_same(place: Path, url: str) -> None:
    """Require that the checkpoint at a URL has the values of the one in a directory."""
    here, there = sw.open(place, skip_unknown=True), sw.open(url, skip_unknown=True)
    assert (here.step, here.left_out) == (there.step, there.left_out)
    wanted, found = here.tensors(), there.tensors()
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        one, other = tensor[...], found[name][...]
        assert (one.dtype, one.shape) == (other.dtype, other.shape), name
        assert torch.equal(
            one.contiguous().flatten().view(torch.uint8),
            other.contiguous().flatten().view(torch.uint8),
        ), name
    names = [name for name in here if name not in wanted]
    assert names == [name for name in there if name not in found]
    assert repr([here[name] for name in names]) == repr([there[name] for name in names])


def save_dcp(place: Path) -> None:
    state = {"model": {"w": torch.arange(60.0).reshape(6, 10)}, "epoch": 3}
    dcp.save(state, checkpoint_id=place, no_dist=True)


def save_huggingface(place: Path) -> None:
    place.mkdir()
    state = {f"layers.{i}.weight": torch.randn(10, 10, dtype=torch.bfloat16) for i in range(4)}
    safetensors.torch.save_file(state, place / "model.safetensors")


def save_with_torch(place: Path) -> None:
    place.mkdir()
    state = {f"w{i}": torch.randn(40 + i) for i in range(20)}
    torch.save({"model": state, "step": 4}, place / "one.pt")


@pytest.mark.parametrize("save", [save_dcp, save_huggingface, save_with_torch])
def test_small_checkpoints_are_the_same(moto: Server, tmp_path: Path, save: object) -> None:  # noqa: F811
    assert callable(save)
    save(tmp_path / "here")
    url = moto.new_url()
    upload(tmp_path / "here", open_store(url))
    single = [path.name for path in (tmp_path / "here").glob("*.pt")]
    if single:
        place, _, options = url.partition("?")
        require_same(tmp_path / "here" / single[0], f"{place}/{single[0]}?{options}")
    else:
        require_same(tmp_path / "here", url)


@pytest.mark.parametrize(
    ("archive", "folder"),
    [
        ("deepspeed", "deepspeed/2/zero2-bfloat16"),
        pytest.param("megatron_plain", "", marks=pytest.mark.long),
        pytest.param("megatron_fully_reshardable", "", marks=pytest.mark.long),
        pytest.param("megatron_fully_sharded_model_space", "", marks=pytest.mark.long),
        ("bytecheckpoint", ""),
    ],
)
def test_archived_checkpoints_are_the_same(
    moto: Server,  # noqa: F811
    tmp_path: Path,
    archive: str,
    folder: str,
) -> None:
    place = unpacked(archive, tmp_path) / folder
    while not folder and len(list(place.iterdir())) == 1:
        (place,) = place.iterdir()
    place = checkpoint_in(place)
    url = str(open_store(moto.new_url()).at(place.name))
    upload(place, open_store(url))
    require_same(place, url)


@pytest.mark.parametrize("name", ["epoch=0-step=10.ckpt", "run 1, Länge.ckpt"])
def test_a_file_of_lightning_is_the_same(moto: Server, tmp_path: Path, name: str) -> None:  # noqa: F811
    """Its default name has equals signs, which `shardwise` itself never writes."""
    unpacked("lightning", tmp_path)
    data = (tmp_path / "epoch=0-step=10.ckpt").read_bytes()
    (tmp_path / name).write_bytes(data)
    url, client = moto.new_url(), s3_client(moto.endpoint)
    bucket, _, path = url.partition("?")[0].removeprefix("s3://").partition("/")
    client.put_object(Bucket=bucket, Key=f"{path}/{name}", Body=data)
    require_same(tmp_path / name, str(open_store(url).at(name)))


def lightning_directory(place: Path) -> None:
    model, optimizer, scheduler = trained()
    named = torch.optim.AdamW(model.named_parameters())
    named.load_state_dict(optimizer.state_dict())
    states = {"state_dict": model.state_dict(), "optimizer_0": named.state_dict()}
    dcp.save(states, checkpoint_id=place, no_dist=True)
    rest = lightning_state(model, (model, optimizer, scheduler))
    del rest["state_dict"], rest["optimizer_states"]
    torch.save(rest, place / "meta.pt")


def accelerate_directory(place: Path) -> None:
    model, optimizer, scheduler = trained()
    named = torch.optim.AdamW(model.named_parameters())
    named.load_state_dict(optimizer.state_dict())
    dcp.save(
        {"model": model.state_dict()}, checkpoint_id=place / "pytorch_model_fsdp_0", no_dist=True
    )
    dcp.save({"optimizer": named.state_dict()}, checkpoint_id=place / "optimizer_0", no_dist=True)
    torch.save(scheduler.state_dict(), place / "scheduler.bin")
    torch.save({"n": 3}, place / "custom_checkpoint_0.pkl")
    for rank in range(2):
        torch.save({"step": 3}, place / f"random_states_{rank}.pkl")


@pytest.mark.parametrize(
    "write", mostly_long([lightning_directory, accelerate_directory], [accelerate_directory])
)
def test_directories_of_trainers_load(
    moto: Server,  # noqa: F811
    tmp_path: Path,
    write: Callable[[Path], None],
) -> None:
    place, url = tmp_path / "here", moto.new_url()
    write(place)
    upload(place, open_store(url))
    require_same(place, url)
    assert_loads(url, trained())
    with sw.Checkpointer(moto.new_url(), memory=None, start_from=url) as checkpointer:
        checkpointer.restore({"model": trained(0)[0]})
        assert checkpointer.last_restore is not None
        assert checkpointer.last_restore.source == "start"


def test_files_of_fsdp_ranks_are_the_same(moto: Server, gang: Gang, tmp_path: Path) -> None:  # noqa: F811
    gang.run(save_ranks, str(tmp_path), 2, world=2)
    places = [path for path in sorted(tmp_path.iterdir()) if path.is_dir()]
    assert len(places) >= 4
    for place in places[:2]:
        url = moto.new_url()
        upload(place, open_store(url))
        require_same(place, url)


def checkpoint_in(place: Path) -> Path:
    """Return the first directory that is a checkpoint, at a path or below."""
    for path in [place, *sorted(each for each in place.rglob("*") if each.is_dir())]:
        try:
            sw.open(path, skip_unknown=True)
        except sw.ShardwiseError:
            continue
        return path
    raise FileNotFoundError(place)


@dataclass
class Reads:
    """The ranges that were requested."""

    ranges: list[tuple[int, int]] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(high - low for low, high in self.ranges)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    found = Reads()
    request = ObjectReader._request

    def counted(self: ObjectReader, low: int, high: int) -> object:
        found.ranges.append((low, high))
        return request(self, low, high)

    monkeypatch.setattr(ObjectReader, "_request", counted)
    return found


def test_opening_reads_no_tensor_and_asks_little(
    moto: Server,  # noqa: F811
    tmp_path: Path,
    reads: Reads,
) -> None:
    """A file of torch.save has a header before each tensor; they are not read one by one."""
    state = {f"w{i}": torch.full((LARGE // 4,), float(i)) for i in range(24)}
    torch.save({"model": state}, tmp_path / "one.pt")
    url = moto.new_url()
    upload(tmp_path, open_store(url))
    place, _, options = url.partition("?")
    found = sw.open(f"{place}/one.pt?{options}")
    assert reads.bytes < LARGE, reads.ranges
    assert len(reads.ranges) <= 8, reads.ranges
    for i in (0, 11, 23):
        assert torch.equal(found.tensors()[f"model.w{i}"][...], state[f"w{i}"])
    assert reads.bytes < 5 * LARGE
    reads.ranges.clear()
    assert torch.equal(found.tensors()["model.w5"][100:200], state["w5"][100:200])
    assert reads.bytes < LARGE // 8


def test_headers_of_safetensors_take_a_request_each(
    moto: Server,  # noqa: F811
    tmp_path: Path,
    reads: Reads,
) -> None:
    large = {f"w{i}": torch.full((LARGE // 4,), float(i)) for i in range(4)}
    safetensors.torch.save_file(large, tmp_path / "model.safetensors")
    url = moto.new_url()
    upload(tmp_path, open_store(url))
    sw.open(url)
    assert len(reads.ranges) == 1
    assert reads.bytes <= 1 << 18


def load_on_rank(url: str) -> None:
    state = {"model": {"w": torch.zeros(6, 10)}, "epoch": 0}
    sw.load(url, state)
    assert torch.equal(state["model"]["w"], torch.arange(60.0).reshape(6, 10))  # type: ignore[index]
    assert state["epoch"] == 3


def test_ranks_load_together(moto: Server, tmp_path: Path, gang: Gang) -> None:  # noqa: F811
    save_dcp(tmp_path / "dcp")
    url = moto.new_url()
    upload(tmp_path / "dcp", open_store(url))
    gang.run(load_on_rank, url, world=2)


def test_what_is_missing_is_told(moto: Server, tmp_path: Path) -> None:  # noqa: F811
    save_dcp(tmp_path / "dcp")
    url = moto.new_url()
    upload(tmp_path / "dcp", open_store(url))
    open_store(url).delete("__0_0.distcp")
    with pytest.raises(sw.FormatError, match=r"s3://.*missing: __0_0\.distcp"):
        sw.open(url)
    with pytest.raises(sw.CheckpointNotFoundError, match="s3://"):
        sw.open(moto.new_url())
