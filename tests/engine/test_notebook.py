"""Reading a checkpoint by name, as in a notebook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardwise as sw
from tests.equal import same_bytes

TABLE = torch.randn(500, 40, 3)
STATE: dict[str, Any] = {
    "model": nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)),
    "t": {
        "table": TABLE,
        "half": torch.randn(4, 6).bfloat16(),
        "scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 3),
    },
    "config": {"lr": 0.1, "sizes": (1, [2, None]), "by": {1: "a", (2, 3): torch.arange(4)}},
    "a": {"b.c": 1, "b": 2, "empty": {}},
    "epoch": 3,
    "mine": sw.PerRank(7),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> sw.Checkpoint:
    place = tmp_path_factory.mktemp("notebook") / "saved"
    sw.save(place, STATE, step=4)
    return sw.open(place)


@pytest.mark.parametrize(
    "index",
    [
        ...,
        7,
        -1,
        slice(None),
        slice(3, 400, 7),
        (slice(None), slice(1, None, 2)),
        (..., 1),
        (0, ..., slice(0, 3, 2)),
        [3, 499, 3, -500],
        torch.tensor([[1, 2], [400, 0]]),
        np.array([5, 2]),
        (slice(0, 500, 100), [1, 39]),
        (slice(0, 2), [1, 1, 0], 2),
        (torch.arange(500) % 3 == 0, 1),
        [],
        slice(5, 5),
    ],
    ids=str,
)
def test_an_index_reads_what_it_selects_from_a_tensor(
    checkpoint: sw.Checkpoint, index: Any
) -> None:
    found = checkpoint["t.table"][index]
    assert same_bytes(found, TABLE[index])
    assert found.shape == TABLE[index].shape


@pytest.mark.parametrize(
    "index",
    [500, (0, 0, 0, 0), [500], [0.5], None, "a", slice(None, None, -1), ([1], [2]), [[]][:0]],
)
def test_an_index_that_does_not_fit_is_an_error(checkpoint: sw.Checkpoint, index: Any) -> None:
    if index == []:
        assert checkpoint["t.table"][index].shape == (0, 40, 3)
        return
    with pytest.raises(IndexError, match=r"^t\.table: "):
        checkpoint["t.table"][index]


def test_index_arrays_read_little(tmp_path: Path) -> None:
    table = torch.arange(8 << 20, dtype=torch.int32).view(-1, 1024)  # 32 MiB in rows of 4 KiB
    sw.save(tmp_path, {"table": table})
    checkpoint = sw.open(tmp_path)
    read: list[int] = []
    store = checkpoint._store
    opened = store.open

    def counting(name: str) -> Any:
        file = opened(name)
        inner = file.read_at

        def read_at(offset: int, out: Any) -> int:
            read.append(len(out))
            return inner(offset, out)

        file.read_at = read_at  # type: ignore[method-assign]
        return file

    checkpoint._store = _Counting(store, counting)  # type: ignore[assignment]
    rows = [8000, 5, 4000]
    assert same_bytes(checkpoint["table"][rows], table[rows])
    assert 0 < sum(read) < 1 << 20


class _Counting:
    """A store whose files count what is read of them."""

    def __init__(self, store: Any, opening: Any) -> None:
        self._store = store
        self.open = opening

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_arrays_and_tensors_are_made_of_saved_tensors(checkpoint: sw.Checkpoint) -> None:
    table, half = checkpoint["t.table"], checkpoint["t.half"]
    assert (len(table), table.ndim, table.nbytes) == (500, 3, TABLE.nbytes)
    for made in (np.asarray(table), np.array(table), np.from_dlpack(table)):
        assert made.tobytes() == TABLE.numpy().tobytes()
    assert np.asarray(table, dtype=np.float16).tobytes() == TABLE.half().numpy().tobytes()
    for tensor in (
        torch.as_tensor(table),
        torch.tensor(table),
        table.tensor(),
        torch.stack([*table]),
    ):
        assert same_bytes(tensor, TABLE)
    assert same_bytes(torch.as_tensor(half), STATE["t"]["half"])
    assert same_bytes(half.tensor(dtype=torch.float64), STATE["t"]["half"].double())
    assert np.array_equal(np.asarray(half, dtype=np.float64), STATE["t"]["half"].double().numpy())
    with pytest.raises(TypeError, match=r"t.half: numpy has no dtype torch.bfloat16: pass a dtype"):
        np.asarray(half)
    with pytest.raises(ValueError, match="copy=False"):
        np.asarray(table, copy=False)
    with pytest.raises(TypeError, match="0-d tensor"):
        len(checkpoint["t.scalar"])
    assert float(checkpoint["t.scalar"].tensor()) == 2.5


def test_a_state_dict_loads_into_its_module(checkpoint: sw.Checkpoint) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    module.load_state_dict(checkpoint.state_dict("model"))
    for name, tensor in STATE["model"].state_dict().items():
        assert same_bytes(module.state_dict()[name], tensor)


def test_tied_tensors_share_memory_in_a_state_dict(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    sw.save(tmp_path, {"model": model})
    found = sw.open(tmp_path).state_dict("model")
    assert found["a.weight"] is found["b.weight"]


def test_nested_values_come_back_as_they_were(checkpoint: sw.Checkpoint) -> None:
    found = checkpoint.to_dict()
    assert list(found) == ["model", "t", "config", "a", "epoch"]
    assert same_bytes(found["config"]["by"].pop((2, 3)), torch.arange(4))
    assert found["config"] == {"lr": 0.1, "sizes": (1, [2, None]), "by": {1: "a"}}
    assert found["a"] == {"b.c": 1, "b": 2, "empty": {}}
    assert found["epoch"] == 3
    for name, tensor in STATE["t"].items():
        assert same_bytes(found["t"][name], tensor)
    assert same_bytes(found["model"]["0"]["weight"], STATE["model"][0].weight)
    assert checkpoint.to_dict(only=["t.*"], skip=["t.table"]).keys() == {"t"}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("model.0.wieght", "did you mean 'model.0.weight'"),
        ("modle", "did you mean 'model'"),
        ("model", "other names begin with it: state_dict('model') reads them"),
        ("mine", "its value differs between ranks"),
    ],
)
def test_a_mistyped_name_suggests_others(checkpoint: sw.Checkpoint, name: str, hint: str) -> None:
    with pytest.raises(KeyError) as caught:
        checkpoint[name]
    assert hint in caught.value.args[0]
    assert name not in checkpoint
    assert checkpoint.get(name, 5) == 5
    if name == "modle":
        for method in (checkpoint.state_dict, checkpoint.boxes):
            with pytest.raises(KeyError, match="did you mean"):
                method(name)


def test_an_optimizer_has_no_state_dict(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    sw.save(tmp_path, {"model": model, "optimizer": torch.optim.SGD(model.parameters())})
    with pytest.raises(sw.StateError, match=r"optimizer: .* sw\.load"):
        sw.open(tmp_path).state_dict("optimizer")


def test_reports_are_sentences(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    place = tmp_path / "saved"
    saved = str(sw.save(place, {"model": model}, step=3))
    assert saved.startswith(f"saved step 3 to {place}: 288 B in 1 file; this rank wrote ")
    loaded = str(sw.load(place, {"model": model}))
    assert loaded.startswith(f"loaded step 3 from {place}: 288 B, for which this rank read ")
    written = str(sw.export(place, tmp_path / "hf"))
    assert written.startswith(f"wrote {tmp_path / 'hf'}: 1 file, of which this rank wrote ")
    report = sw.open(place).verify()
    assert str(report).startswith(f"verified {place}: ")
    assert "without checksums" not in str(report)
    foreign = sw.open(tmp_path / "hf").verify()
    assert (foreign.bytes_checked, foreign.bytes_unchecked) == (0, 288)
    with sw.Checkpointer(tmp_path / "run", memory=None) as checkpointer:
        checkpointer.save(2, {"model": model})
        checkpointer.restore({"model": model})
        assert str(checkpointer.last_restore).startswith("restored step 2 from storage; loaded ")
