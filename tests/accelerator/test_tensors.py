"""CUDA tensors of all dtypes and memory layouts are saved and loaded, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.equal import same_bytes

SHAPE = (6, 4, 5, 8)
DTYPES = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
NAMES = sorted(
    name
    for name in (str(each).removeprefix("torch.") for each in DTYPES)
    if not name.startswith(("qint", "quint"))  # which need a quantizer
)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types that torch compares, by their sizes."""
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "sliced": lambda t: t[1:5, :, ::2, 1:],
    "channels_last": lambda t: t.permute(0, 3, 1, 2),
    "column": lambda t: t[..., 3],
    "row": lambda t: t[2, 1],
    "scalar": lambda t: t[0, 1, 2, 3],
    "empty": lambda t: t[:0],
    "offset": lambda t: t.view(-1)[3:],
}


def random_tensor(dtype: torch.dtype, seed: int, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    """A tensor of random bytes; for bool, of zeros and ones."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(high, (*shape[:-1], shape[-1] * size), generator=generator)
    return raw.to(torch.uint8).view(dtype)


def state_on(device: torch.device | str, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    return {
        name: layout(random_tensor(dtype, seed + i).to(device))
        for i, (name, layout) in enumerate(LAYOUTS.items())
    }


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, of a dtype that has kernels: torch cannot compare all dtypes."""
    base = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    whole = torch.empty(0, dtype=tensor.dtype).set_(base.cpu().untyped_storage())
    plain = whole if whole.dtype.itemsize == 16 else whole.view(INTEGERS[whole.dtype.itemsize])
    return plain.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("source", "target"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_all_dtypes_and_layouts_keep_their_bytes(
    name: str, source: str, target: str, tmp_path: Path
) -> None:
    dtype = getattr(torch, name)
    saved, loaded = state_on(source, dtype, 1), state_on(target, dtype, 100)
    sw.save(tmp_path / "a", {"model": saved})
    sw.load(tmp_path / "a", {"model": loaded})
    for key, tensor in saved.items():
        assert loaded[key].device.type == target
        assert loaded[key].stride() == tensor.stride()
        assert same_bytes(on_host(loaded[key]), on_host(tensor)), key


@pytest.mark.parametrize("kind", ["conj", "neg", "expanded"])
def test_views_that_need_a_copy(kind: str, tmp_path: Path, cuda: torch.device) -> None:
    def make(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        if kind == "expanded":
            return torch.randn(5, 1, device=cuda).expand(5, 7)
        values = torch.randn(5, 7, dtype=torch.complex64, device=cuda)
        return values.conj() if kind == "conj" else values.conj().imag

    saved, loaded = make(1), make(2)
    sw.save(tmp_path / "a", {"x": saved})
    sw.load(tmp_path / "a", {"x": loaded})
    assert torch.equal(saved, loaded)


def test_tied_tensors_and_views_of_one_storage(tmp_path: Path, cuda: torch.device) -> None:
    def make(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        flat = torch.randn(64, device=cuda)
        return {
            "flat": flat, "tied": flat, "matrix": flat.view(8, 8),
            "half": flat[:32], "transposed": flat.view(8, 8).t(),
        }  # fmt: skip

    saved, loaded = make(1), make(2)
    sw.save(tmp_path / "a", saved)
    sw.load(tmp_path / "a", loaded)
    assert torch.equal(loaded["flat"], saved["flat"])
    assert loaded["half"].data_ptr() == loaded["flat"].data_ptr()


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float8_e4m3fn),
        (torch.float64, torch.float16),
        (torch.int64, torch.int32),
    ],
)
def test_conversions_give_the_bytes_of_a_conversion_on_the_host(
    stored: torch.dtype, wanted: torch.dtype, tmp_path: Path, cuda: torch.device
) -> None:
    values = (torch.randn(257, 33) * 20).to(stored)
    sw.save(tmp_path / "a", {"x": values.to(cuda)})
    on_device, on_cpu = (torch.zeros(257, 33, dtype=wanted, device=d) for d in (cuda, "cpu"))
    sw.load(tmp_path / "a", {"x": on_device}, cast=True)
    sw.load(tmp_path / "a", {"x": on_cpu}, cast=True)
    assert same_bytes(on_device.cpu(), on_cpu)
    assert same_bytes(on_cpu, values.to(wanted))


def test_large_tensors_of_several_buffers(tmp_path: Path, cuda: torch.device) -> None:
    torch.manual_seed(0)
    saved = {
        "a": torch.randn(3000, 5001, device=cuda),
        "b": torch.randn(5001, 3000, device=cuda).t(),
    }
    loaded = {"a": torch.zeros(3000, 5001, device=cuda), "b": torch.zeros(3000, 5001, device=cuda)}
    sw.save(tmp_path / "a", saved)
    sw.load(tmp_path / "a", loaded)
    for key, tensor in saved.items():
        assert torch.equal(loaded[key], tensor), key


def test_sharded_tensors_on_the_device(tmp_path: Path, cuda: torch.device) -> None:
    whole = torch.randn(64, 48, device=cuda)
    boxes = [sw.Box((0, 0), (40, 48)), sw.Box((40, 0), (24, 48))]
    parts = [(box, whole[box.slices()].clone()) for box in boxes]
    sw.save(tmp_path / "a", {"x": sw.Shards((64, 48), whole.dtype, parts)})
    columns = torch.zeros(64, 20, device=cuda)
    target = sw.Shards((64, 48), whole.dtype, [(sw.Box((0, 11), (64, 20)), columns)])
    sw.load(tmp_path / "a", {"x": target})
    assert torch.equal(columns, whole[:, 11:31])


def test_a_state_on_two_devices(tmp_path: Path, cuda: torch.device) -> None:
    saved = {"a": torch.randn(99, device=cuda), "b": torch.randn(99)}
    swapped = {"a": torch.zeros(99), "b": torch.zeros(99, device=cuda)}
    sw.save(tmp_path / "a", saved)
    sw.load(tmp_path / "a", swapped)
    assert torch.equal(swapped["a"], saved["a"].cpu())
    assert torch.equal(swapped["b"].cpu(), saved["b"])
