"""Files of torch.save, of each kind: what is read is what torch loads, and no tensor is."""

from __future__ import annotations

import io
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.parts.formats.reader import FileTree, FormatError, StoredArray, UnknownObject
from tests.formats.comparing import assert_same
from tests.formats.reference import read_array

KINDS = [True, False]  # zip archives, and what was before


def load(path: Path, *, skip_unknown: bool = False) -> Any:
    return FileTree(path.parent, skip_unknown=skip_unknown).load(path.name)


def is_supported(dtype: torch.dtype) -> bool:
    try:
        return bool(StoredArray("", 0, str(dtype).removeprefix("torch."), (), ()).itemsize)
    except FormatError:
        return False


DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and is_supported(dtype)
}


def save(value: object, path: Path, *, zipped: bool = True, protocol: int = 2) -> bytes:
    torch.save(value, path, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    return path.read_bytes()


def tensors_of(data: bytes, value: Any) -> Any:
    """The same with tensors in place of stored arrays."""
    if isinstance(value, StoredArray):
        return read_array(np.frombuffer(data, np.uint8), value)
    if isinstance(value, dict):
        return {key: tensors_of(data, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [tensors_of(data, item) for item in value]
    return value


def training_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "parameters": list(model.parameters()),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
        "epoch": 3,
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "size": torch.Size([1, 2]),
        "version": torch.__version__,
    }


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("zipped", KINDS)
def test_a_training_state_is_as_torch_loads_it(zipped: bool, protocol: int, tmp_path: Path) -> None:
    state = training_state()
    data = save(state, tmp_path / "a.pt", zipped=zipped, protocol=protocol)
    contents = load(tmp_path / "a.pt")
    assert_same(tensors_of(data, contents), state)
    assert FileTree(tmp_path).container_of("a.pt") == "torch.save"


def tensor_of(name: str) -> torch.Tensor:
    raw = torch.arange(6 * DTYPES[name].itemsize, dtype=torch.uint8)
    return raw.view(DTYPES[name]).reshape(2, 3)


def is_saved(name: str) -> bool:
    """Whether torch itself saves this dtype, which it does not of integers of less than a byte."""
    try:
        torch.save(tensor_of(name), io.BytesIO())
    except (RuntimeError, NotImplementedError, KeyError, AttributeError):
        return False
    return True


def test_only_parts_of_bytes_are_not_saved() -> None:
    assert {name for name in DTYPES if not is_saved(name)} <= {
        f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)
    }


@pytest.mark.parametrize("zipped", KINDS)
@pytest.mark.parametrize("name", sorted(filter(is_saved, DTYPES)))
def test_every_dtype(name: str, zipped: bool, tmp_path: Path) -> None:
    tensor = tensor_of(name)
    data = save(tensor, tmp_path / "a.pt", zipped=zipped)
    contents = load(tmp_path / "a.pt")
    assert_same(tensors_of(data, contents), tensor)


@pytest.mark.parametrize("zipped", KINDS)
def test_views_and_ties_keep_their_geometry(zipped: bool, tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    value = {
        "base": base,
        "again": base,
        "transposed": base.t(),
        "column": base[:, 2],
        "part": base[1:3, 2:5],
        "expanded": base[0:1].expand(3, 6),
        "scalar": base[2, 3],
        "empty": torch.zeros(0, 5),
        "empty view": base[2:2],
    }
    data = save(value, tmp_path / "a.pt", zipped=zipped)
    read = load(tmp_path / "a.pt")
    assert_same(tensors_of(data, read), value)
    assert read["base"] == read["again"]
    assert read["base"].start == read["transposed"].start
    assert read["transposed"].stride == (1, 6)


@pytest.mark.parametrize("zipped", KINDS)
def test_a_file_within_a_file(zipped: bool, tmp_path: Path) -> None:
    value = {"a": torch.arange(5), "b": torch.zeros(2, 2)}
    inner = save(value, tmp_path / "a.pt", zipped=zipped)
    data = b"x" * 1001 + inner + b"y" * 77
    (tmp_path / "b").write_bytes(data)
    tree = FileTree(tmp_path)
    with tree.open_range("b") as file:
        read = tree.load_range(file.subrange(1001, len(inner), "part"))
    assert_same(tensors_of(data, read), value)


def test_a_large_file_of_before_is_not_read_whole(tmp_path: Path) -> None:
    value = {f"layer.{i}" * 40: torch.full((300,), i) for i in range(3000)}
    data = save(value, tmp_path / "a.pt", zipped=False)
    assert_same(tensors_of(data, load(tmp_path / "a.pt")), value)


def test_an_archive_of_wide_fields(tmp_path: Path) -> None:
    save({"a": torch.arange(5)}, tmp_path / "a.pt")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as source,
        zipfile.ZipFile(tmp_path / "b.pt", "w") as target,
    ):
        for info in source.infolist():
            with target.open(info.filename, "w", force_zip64=True) as file:
                file.write(source.read(info))
    data = (tmp_path / "b.pt").read_bytes()
    read = load(tmp_path / "b.pt")
    assert_same(tensors_of(data, read), {"a": torch.arange(5)})


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: torch.zeros(3).to_sparse(), "torch._utils._rebuild_sparse_tensor"),
        (
            lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8),
            "torch._utils._rebuild_qtensor",
        ),
        (lambda: torch.zeros(3, device="meta"), "torch._utils._rebuild_meta_tensor_no_storage"),
        (lambda: torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
    ],
)
def test_what_is_no_plain_tensor_is_named(
    make: Callable[[], object], name: str, tmp_path: Path
) -> None:
    save(OrderedDict(a=make(), b=torch.ones(2)), tmp_path / "a.pt")
    with pytest.raises(FormatError, match=name):
        load(tmp_path / "a.pt")
    contents = load(tmp_path / "a.pt", skip_unknown=True)
    assert contents["a"] == UnknownObject(name)
    assert contents["b"].shape == (2,)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_program_is_refused(tmp_path: Path) -> None:
    program = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), program)
    (tmp_path / "a.pt").write_bytes(program.getvalue())
    with pytest.raises(FormatError, match="TorchScript"):
        load(tmp_path / "a.pt")


@pytest.mark.parametrize("new", [True, False])
def test_conjugated_and_negated_views_are_refused_by_name(new: bool, tmp_path: Path) -> None:
    whole = torch.ones(2, dtype=torch.complex64)
    negated = torch.ones(3, dtype=torch.complex64).conj().imag
    state = {"a": whole, "model": {"b": whole.conj(), "c": [0, negated]}}
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=new)
    with pytest.raises(FormatError, match=r"a\.pt: .*near 'b'.*resolve_conj"):
        load(tmp_path / "a.pt")
    save(whole.conj(), tmp_path / "one.pt")
    with pytest.raises(FormatError, match=r"one\.pt: a conjugated"):
        load(tmp_path / "one.pt")


def test_files_that_are_alike_are_parsed_once(tmp_path: Path) -> None:
    """Whatever the bytes of their tensors and the names of their archives."""
    names = [f"rank{number}.pt" for number in range(4)]
    for name, shape in zip(names, [(2, 3), (2, 3), (3, 2), (2, 3)], strict=True):
        torch.save({"w": torch.randn(shape), "n": torch.randn(4)}, tmp_path / name)
    tree = FileTree(tmp_path)
    read, alone = tree.load_each(names, share_equal=True), tree.load_each(names)
    assert read["rank0.pt"] is read["rank1.pt"] is read["rank3.pt"]
    assert read["rank2.pt"] is not read["rank0.pt"]
    for name in names:
        assert {key: replace(array, file=name) for key, array in read[name].items()} == alone[name]


def test_of_files_that_are_alike_only_the_places_may_differ(tmp_path: Path) -> None:
    """A pickle that is the same, with its arrays elsewhere, is not taken for alike."""
    for number, gap in enumerate([b"", b"-" * 64]):
        path = tmp_path / f"{number}.pt"
        torch.save([torch.arange(4)], path)
        with zipfile.ZipFile(path) as old:
            entries = {name: old.read(name) for name in old.namelist()}
        with zipfile.ZipFile(path, "w") as new:
            if gap:
                new.writestr(f"{number}/gap", gap)
            for name, data in entries.items():
                new.writestr(name, data)
    for name, (array,) in FileTree(tmp_path).load_each(["0.pt", "1.pt"], share_equal=True).items():
        assert array.file == name
        data = np.frombuffer((tmp_path / name).read_bytes(), np.uint8)
        assert torch.equal(read_array(data, array), torch.arange(4))
