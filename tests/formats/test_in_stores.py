"""Foreign checkpoints in an object store are read in place: all values, in few requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import shardwise as sw
from shardwise.engine.buffers import aligned_buffer
from shardwise.store import LocalStore, Store, open_store, store_below
from shardwise.store.object_reader import ObjectReader
from shardwise.testing.gang import Gang
from tests.formats.foreign_goldens import unpacked
from tests.store.servers import Server, moto  # noqa: F401 - a fixture

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
        ("megatron_legacy", "megatron-legacy/4/bfloat16"),
        ("megatron_plain", ""),
        ("bytecheckpoint", ""),
        ("torchsnapshot", ""),
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


def test_an_index_follows_the_versions_of_objects(moto: Server, tmp_path: Path) -> None:  # noqa: F811
    save_huggingface(tmp_path / "hf")
    url = moto.new_url()
    upload(tmp_path / "hf", open_store(url))
    index = tmp_path / "index"
    sw.open(url, index=index)
    written = index.stat().st_ino
    sw.open(url, index=index)
    assert index.stat().st_ino == written
    save_huggingface(tmp_path / "other")
    open_store(url).delete("model.safetensors")
    upload(tmp_path / "other", open_store(url))
    sw.open(url, index=index)
    assert index.stat().st_ino != written
