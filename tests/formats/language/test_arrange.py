"""Writing by a specification: read(write(x)) is x, and the arrays are those that numpy cuts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from shardwise.errors import MismatchError
from shardwise.formats.catalogue import Catalogue
from shardwise.formats.language import Arrangement, arrange, parse
from shardwise.manifest.manifest import TensorEntry
from tests.formats.language.rankfiles import NOWHERE, Array, numbered, same
from tests.formats.reference import read_tensors

Tensors = Mapping[str, Array]


def written(text: str, axes: Mapping[str, int], tensors: Tensors, **options: int) -> Arrangement:
    entries = [TensorEntry(name, a.dtype.name, a.shape) for name, a in tensors.items()]
    return arrange(parse(text), entries, axes, sizes=options)


def contents(arrangement: Arrangement, tensors: Tensors) -> list[bytearray]:
    """The rank files, filled element by element."""
    foreign = arrangement.foreign
    files = [bytearray(file.size) for file in foreign.files]
    for laid in (foreign.laid, foreign.replicas):
        for i in range(len(laid)):
            entry = foreign.tensors[laid.pieces.tensor[i]]
            source, dims = tensors[entry.name.split("#")[0]], len(entry.shape)
            offset, shape = laid.pieces.offset[i, :dims], laid.pieces.shape[i, :dims]
            box = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
            flat = np.frombuffer(files[laid.pieces.file[i]], source.dtype)
            start = laid.pieces.start[i] // source.itemsize
            steps = [int(s) * source.itemsize for s in laid.stride[i, :dims]]
            there = np.lib.stride_tricks.as_strided(flat[start:], tuple(shape), steps)
            there[...] = source[box]
    return files


def arrays(catalogue: Catalogue, files: list[bytearray]) -> dict[tuple[int, ...], dict[str, Array]]:
    found: dict[tuple[int, ...], dict[str, Array]] = {}
    for i in range(len(catalogue)):
        dtype = np.dtype(catalogue.dtypes[catalogue.dtype[i]])
        shape = tuple(catalogue.shape[i, : catalogue.ndim[i]].tolist())
        start = int(catalogue.start[i])
        data = files[catalogue.file[i]][start : start + int(np.prod(shape)) * dtype.itemsize]
        rank = tuple(catalogue.coordinate[i].tolist())
        name = catalogue.names[catalogue.name[i]]
        found.setdefault(rank, {})[name] = np.frombuffer(data, dtype).reshape(shape)
    return found


def round_trip(
    text: str, axes: Mapping[str, int], tensors: Tensors, **options: int
) -> dict[tuple[int, ...], dict[str, Array]]:
    """Arrays of each rank, after they were read again."""
    arrangement = written(text, axes, tensors, **options)
    files = contents(arrangement, tensors)
    full = tuple(
        replace(file, content=bytes(data))
        for file, data in zip(arrangement.foreign.files, files, strict=True)
    )
    read = read_tensors(NOWHERE, replace(arrangement.foreign, files=full))
    assert read.keys() == tensors.keys()
    for name, array in tensors.items():
        same(read[name], array)
    return arrays(arrangement.catalogue, files)


def test_fused_and_sharded() -> None:
    gate, up = numbered(4, 3), numbered(4, 3) + 100
    text = "ranks tp\nw [((gate + up) f) h] -> gate [(gate tp f) h], up [(up tp f) h]"
    got = round_trip(text, {"tp": 2}, {"gate": gate, "up": up})
    assert np.array_equal(got[1,]["w"], np.concatenate([gate[2:], up[2:]]))


def test_layers_experts_and_replicas() -> None:
    tensors = {f"layers.{i}.w": numbered(2) + 10 * i for i in range(5)} | {
        f"layers.{i}.e.{e}": numbered(2) + 100 * e + i for i in (1, 3) for e in range(4)
    }
    text = """
        ranks pp ep
        l.{i}.w -> layers.{pp ~i}.w
        l.{i}.e.{e} -> layers.{pp ~i}.e.{ep e}
    """
    got = round_trip(text, {"pp": 2, "ep": 2}, tensors)
    assert sorted(got[0, 1]) == ["l.0.w", "l.1.e.0", "l.1.e.1", "l.1.w", "l.2.w"]
    assert np.array_equal(got[1, 1]["l.0.e.1"], tensors["layers.3.e.3"])
    stacked = (
        "ranks pp ep\nl.{i}.w -> layers.{pp ~i}.w\nl.{i}.e [e h] -> layers.{pp ~i}.e.{ep e} [h]"
    )
    got = round_trip(stacked, {"pp": 2, "ep": 2}, tensors)
    assert got[1, 0]["l.0.e"].shape == (2, 2)


def test_captured_axes() -> None:
    whole = numbered(4, 3)
    got = round_trip("ranks ep\ne.{e} -> w [(ep e) h]", {"ep": 2}, {"w": whole})
    assert np.array_equal(got[1,]["e.0"], whole[2])


def test_padding_is_made_again() -> None:
    whole = numbered(5, 2)
    text = "ranks tp\nlet vocab\ne -> e [(tp v 4)[:vocab] h]"
    got = round_trip(text, {"tp": 2}, {"e": whole}, vocab=5)
    assert np.array_equal(got[1,]["e"], np.concatenate([whole[4:], np.zeros((3, 2), np.int32)]))


@pytest.mark.parametrize("where", ["", " where f = [3, 1, 3]"])
def test_unequal_shards(where: str) -> None:
    whole = numbered(7, 2)
    got = round_trip("ranks tp\nw -> w [(tp ~f) h]" + where, {"tp": 3}, {"w": whole})
    assert [len(got[t,]["w"]) for t in range(3)] == ([3, 1, 3] if where else [3, 3, 1])


def test_flat_ranges() -> None:
    tensors = {"a": numbered(3, 3), "b": numbered(4) + 100}
    got = round_trip("ranks dp\nflat -> a, b flat over dp", {"dp": 3}, tensors)
    assert np.array_equal(got[2,]["flat"], [101, 102, 103, 0, 0])


def test_a_rank_writes_a_tensor_by_one_rule() -> None:
    text = """
        ranks pp
        embed -> embed on pp = 0
        old_embed -> embed on pp = 0
        head -> embed on pp = |pp| - 1
    """
    whole = {"embed": numbered(2)}
    assert {r: sorted(a) for r, a in round_trip(text, {"pp": 1}, whole).items()} == {
        (0,): ["embed"]
    }
    assert {r: sorted(a) for r, a in round_trip(text, {"pp": 2}, whole).items()} == {
        (0,): ["embed"],
        (1,): ["head"],
    }


def test_optimizer_states() -> None:
    w = numbered(4, 2)
    text = """
        ranks tp
        * -> model.* [(tp f) h]
        optimizer.*.{state} like *, model.* -> optimizer.*.{state}
    """
    # The more special rule must come first, or `*` takes all.
    first = "ranks tp\no.*.{s} like m.*, model.* -> optimizer.*.{s}\nm.* -> model.* [(tp f) h]"
    got = round_trip(first, {"tp": 2}, {"model.a.b": w, "optimizer.a.b.exp_avg": w + 50})
    assert np.array_equal(got[1,]["o.a.b.exp_avg"], w[2:] + 50)
    assert parse(text)


def test_what_cannot_be_written_is_told() -> None:
    entries = {"w": numbered(3, 2), "x": numbered(1), "q": numbered(2)}
    text = """
        ranks tp
        w -> w [(tp f) h]
        f [(q + k)] -> q [q], k [k]
        *.lost -> lost
    """
    with pytest.raises(MismatchError) as error:
        written(text, {"tp": 2}, entries | {"lost": numbered(1)})
    assert error.value.problems == [
        "specification:5: names of tensors do not say what `*` was, so nothing can be written",
        "specification:3: `(tp f)` cannot be 3 with tp = 2: it does not divide",
        "specification:4: q is there, but no k, which is stored with it",
    ]
    with pytest.raises(MismatchError) as error:
        written("w -> w", {}, {"w": numbered(1), "x": numbered(1)})
    assert error.value.problems == ["x: no rule writes it"]
