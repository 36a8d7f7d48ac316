"""Sparse, jagged and quantized tensors, and what two of them must have in common to be equal."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool),
    *(torch.complex128, torch.complex64, torch.complex32),
]


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return values that each dtype can have, and that differ between seeds."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)


def coo(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Another number of values for each seed, in an order that is not sorted, with repetitions."""
    n = 5 + seed
    indices = torch.stack([numbers(n, seed=seed) % 4, numbers(n, seed=seed + 9) % 6]).long()
    return torch.sparse_coo_tensor(indices, numbers(n, seed=seed, dtype=dtype), (4, 6))


def compressed(layout: torch.layout) -> Callable[[int], torch.Tensor]:
    def make(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        dense = torch.where(numbers(4, 6, seed=seed) % 3 == seed % 3, numbers(4, 6, seed=seed), 0)
        block = (2, 3) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
        if block is not None:
            dense[: 2 * (seed % 2)] = 0
        found = dense.to_sparse(layout=layout, blocksize=block)
        rows = layout in (torch.sparse_csr, torch.sparse_bsr)
        keys = ("crow_indices", "col_indices") if rows else ("ccol_indices", "row_indices")
        indices = [getattr(found, key)() for key in keys]
        values = found.values().to(dtype)
        return torch.sparse_compressed_tensor(*indices, values, size=(4, 6), layout=layout)

    return make


def csr_of_int32(seed: int) -> torch.Tensor:
    found = compressed(torch.sparse_csr)(seed)
    indices = found.crow_indices().int(), found.col_indices().int()
    return torch.sparse_csr_tensor(*indices, found.values(), found.shape)


def unsorted_csr(seed: int) -> torch.Tensor:
    crow, columns = torch.tensor([0, 2 + seed, 4 + seed]), [5, 0, 4, 1, 3, 2, 5, 0][: 4 + seed]
    return torch.sparse_csr_tensor(
        crow, torch.tensor(columns), numbers(4 + seed, seed=seed), (2, 6)
    )


def batched_csr(seed: int) -> torch.Tensor:
    rows = torch.eye(6)[:4].roll(seed, 1)
    if seed % 2:
        rows[:, 0] = 7
    return torch.stack([rows, rows + rows]).to_sparse_csr()


def jagged(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    parts = [numbers(n, 3, seed=seed, dtype=dtype) for n in (2 + seed, 4, 1)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def narrowed(seed: int) -> torch.Tensor:
    lengths = torch.tensor([3, 2, 1 + seed])
    starts = torch.tensor([0, 1, 2])
    padded = numbers(3, 6, 2, seed=seed)
    return torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged)


def without_bounds(seed: int) -> torch.Tensor:
    offsets = torch.tensor([0, 2, 2 + seed], dtype=torch.int32)
    return torch.nested.nested_tensor_from_jagged(numbers(2 + seed, 3, seed=seed), offsets)


def per_tensor(dtype: torch.dtype) -> Callable[[int], torch.Tensor]:
    def make(seed: int) -> torch.Tensor:
        return quantize(
            torch.quantize_per_tensor, numbers(3, 4, seed=seed), 0.1 + seed, seed, dtype
        )

    return make


def per_channel(dtype: torch.dtype, axis: int) -> Callable[[int], torch.Tensor]:
    def make(seed: int) -> torch.Tensor:
        n = (3, 4)[axis]
        scales, zero_points = numbers(n, seed=seed).double() / 7 + 0.1, torch.arange(n) + seed
        values = numbers(3, 4, seed=seed)
        return quantize(torch.quantize_per_channel, values, scales, zero_points, axis, dtype)

    return make


def float_parameters(seed: int) -> torch.Tensor:
    scales, zero_points = numbers(3, seed=seed) / 7 + 0.1, numbers(3, seed=seed + 1) / 3
    values = numbers(3, 4, seed=seed)
    return quantize(torch.quantize_per_channel, values, scales, zero_points, 0, torch.quint8)


def quantize(function: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*arguments)


MAKERS: dict[str, Callable[[int], torch.Tensor]] = {
    "coo": coo,
    "coo, coalesced": lambda seed: coo(seed).coalesce(),
    "coo, another flag": lambda seed: coo(seed).coalesce() if seed else coo(seed),
    "coo, without values": lambda seed: coo(1) if seed else torch.zeros(4, 6).to_sparse(),
    "coo, to be without values": lambda seed: torch.zeros(4, 6).to_sparse() if seed else coo(1),
    "coo, dense dimension": lambda seed: torch.sparse_coo_tensor(
        numbers(1, 3 + seed, seed=seed).long() % 4, numbers(3 + seed, 6, seed=seed), (4, 6)
    ),
    "coo, no sparse dimension": lambda seed: torch.sparse_coo_tensor(
        torch.zeros(0, 2 + seed).long(), numbers(2 + seed, 3, seed=seed), (3,)
    ),
    "coo, an empty dimension": lambda seed: torch.sparse_coo_tensor(
        torch.zeros(1, 2 + seed).long(), numbers(2 + seed, 0), (3, 0)
    ),
    "coo, transposed": lambda seed: coo(seed).coalesce().t(),
    "csr": compressed(torch.sparse_csr),
    "csc": compressed(torch.sparse_csc),
    "bsr": compressed(torch.sparse_bsr),
    "bsc": compressed(torch.sparse_bsc),
    "csr, 32-bit indices": csr_of_int32,
    "csr, not sorted": unsorted_csr,
    "csr, batches": batched_csr,
    "csr, dense dimension": lambda seed: torch.where(
        numbers(4, 6, 1, seed=seed) % 3 == 0, numbers(4, 6, 2, seed=seed), 0
    ).to_sparse_csr(dense_dim=1),
    "csr, without values": lambda seed: (torch.eye(4) * seed).to_sparse_csr(),
    "csr, to be without values": lambda seed: (torch.eye(4) * (1 - seed)).to_sparse_csr(),
    "jagged": jagged,
    "jagged, equal sizes": lambda seed: torch.nested.nested_tensor(
        [numbers(n, 3, seed=seed) for n in (2, 4)], layout=torch.jagged
    ),
    "jagged, transposed": lambda seed: jagged(seed).transpose(1, 2),
    "jagged, with lengths": narrowed,
    "jagged, 32-bit offsets": without_bounds,
    "jagged, without values": lambda seed: torch.nested.nested_tensor(
        [torch.zeros(0, 3)] * 2 if not seed else [torch.ones(2, 3)] * 2, layout=torch.jagged
    ),
    "qint8": per_tensor(torch.qint8),
    "quint8": per_tensor(torch.quint8),
    "qint32": per_tensor(torch.qint32),
    "qint8, channels": per_channel(torch.qint8, 0),
    "quint8, other channels": per_channel(torch.quint8, 1),
    "qint32, channels": per_channel(torch.qint32, 0),
    "quint8, float zero points": float_parameters,
    "qint8, transposed": lambda seed: per_tensor(torch.qint8)(seed).t(),
}
"""Each makes a tensor, whose size may depend on the seed."""


def raw(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the dtype, the shape and the bytes of a plain tensor."""
    data = tensor.detach().contiguous().reshape(-1)
    return data.dtype, tuple(tensor.shape), data.view(torch.uint8).numpy().tobytes()


def contents(tensor: Any) -> dict[str, Any]:
    """Return all that makes up a tensor, with methods of torch alone."""
    found: dict[str, Any] = {"dtype": tensor.dtype, "layout": tensor.layout}
    if tensor.is_quantized:
        found |= {"scheme": tensor.qscheme(), "numbers": raw(tensor.int_repr())}
        if tensor.qscheme() == torch.per_tensor_affine:
            return found | {"quantizer": (tensor.q_scale(), tensor.q_zero_point())}
        scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        return found | {"quantizer": (raw(scales), raw(zeros), tensor.q_per_channel_axis())}
    if tensor.layout == torch.jagged:
        found["dims"] = [
            None if dim == tensor._ragged_idx else n for dim, n in enumerate(tensor.shape)
        ]
        keys = [
            key for key in ("_values", "_offsets", "_lengths") if getattr(tensor, key) is not None
        ]
        found |= {key: raw(getattr(tensor, key)) for key in keys}
        found["bounds"] = {key: len(each) for key, each in tensor._metadata_cache.items()}
        return found
    found["shape"] = tuple(tensor.shape)
    if tensor.layout == torch.sparse_coo:
        return found | {
            "is_coalesced": tensor.is_coalesced(),
            "indices": raw(tensor._indices()),
            "values": raw(tensor._values()),
        }
    local = tensor.detach()
    keys = ["crow_indices", "col_indices"]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        keys = ["ccol_indices", "row_indices"]
    return found | {key: raw(getattr(local, key)()) for key in (*keys, "values")}
