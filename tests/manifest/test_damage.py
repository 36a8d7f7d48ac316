"""Manifests that were damaged or mutated: refused, or the same in content. Nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.kernel.boxes import Box, find_uncovered_tensors
from shardwise.kernel.errors import FormatError, StateError
from shardwise.kernel.manifest.dtypes import DTYPES
from shardwise.kernel.manifest.manifest import (
    FileEntry,
    Manifest,
    ObjectEntry,
    TensorEntry,
    complete_manifest,
    decode_manifest,
    encode_manifest,
)
from shardwise.kernel.manifest.pieces import encode_tensors_with
from shardwise.kernel.manifest.validate import layout_of_manifest
from tests.breadth import examples
from tests.manifest.documents import Document, document_of, sealed


def test_cut_off_anywhere_it_is_refused(pristine: Path) -> None:
    data = (pristine / "manifest.json").read_bytes()
    for size in range(len(data)):
        with pytest.raises(FormatError):
            decode_manifest(data[:size])


def test_any_altered_byte_is_noticed(pristine: Path) -> None:
    data = (pristine / "manifest.json").read_bytes()
    manifest = decode_manifest(data)
    for at in range(len(data)):
        for mask in (1, 0x20, 0x80, 0xFF):
            flipped = bytearray(data)
            flipped[at] ^= mask
            assert_refused_or_equal(bytes(flipped), manifest)


def test_an_altered_draft_is_noticed_when_it_is_completed(pristine: Path) -> None:
    manifest = decode_manifest((pristine / "manifest.json").read_bytes())
    draft = encode_manifest(msgspec.structs.replace(manifest, files=()))
    assert complete_manifest(draft, manifest.files) == encode_manifest(manifest)
    for at in range(len(draft)):
        for mask in (1, 0x20, 0x80, 0xFF):
            flipped = bytearray(draft)
            flipped[at] ^= mask
            with pytest.raises(FormatError, match="pending manifest"):
                complete_manifest(bytes(flipped), manifest.files)


@given(st.binary(max_size=40), st.integers(0, 10_000), st.integers(0, 40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_spliced_bytes_are_noticed(pristine: Path, new: bytes, where: int, cut: int) -> None:
    data = (pristine / "manifest.json").read_bytes()
    at = where % len(data)
    assert_refused_or_equal(data[:at] + new + data[at + cut :], decode_manifest(data))


def assert_refused_or_equal(data: bytes, manifest: Manifest) -> None:
    """What is read of these bytes is what was written, if it is read at all."""
    try:
        found = decode_manifest(data)
    except FormatError:
        return
    assert found == manifest


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, 2, 4096, 2**24, 2**62, 2**63]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=4),
    st.sampled_from(["model.weight", "model.tied", "sharded", "float32", "int8", "manifest.json"]),
    st.lists(st.integers(-1, 5), max_size=3),
    st.dictionaries(st.sampled_from(["name", "count", "offset"]), st.integers(0, 3), max_size=2),
)


@examples(
    200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_mutations_with_a_right_checksum_are_refused_or_make_sense(
    pristine: Path, data: st.DataObject
) -> None:
    document = copy.deepcopy(document_of(pristine))
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(document, data)
    try:
        layout = layout_of_manifest(decode_manifest(sealed(document)))
    except FormatError:
        return
    boxes = boxes_of(layout.pieces)
    assert_covered_once(layout.tensors, [(int(t), o, s) for t, o, s in boxes])


def boxes_of(pieces: Any) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    columns = pieces.tensor.tolist(), pieces.offset.tolist(), pieces.shape.tolist()
    return [(t, tuple(o), tuple(s)) for t, o, s in zip(*columns, strict=True)]


def mutate(document: Document, data: st.DataObject) -> None:
    """Replace, remove, or copy something somewhere."""
    here: Any = document
    while True:
        keys = list(here) if isinstance(here, dict) else list(range(len(here)))
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        below = here[key]
        if isinstance(below, dict | list) and below and data.draw(st.integers(0, 5)):
            here = below
            continue
        action = data.draw(st.sampled_from(["replace", "nudge", "remove", "copy"]))
        if action == "remove":
            del here[key]
        elif action == "copy" and isinstance(here, list):
            here.append(copy.deepcopy(below))
        elif action == "nudge" and type(below) is int:
            here[key] = below + data.draw(st.sampled_from([-4096, -1, 1, 2, 4, 4096]))
        else:
            here[key] = data.draw(values)
        return


def assert_covered_once(
    tensors: Sequence[TensorEntry], boxes: list[tuple[int, tuple[int, ...], tuple[int, ...]]]
) -> None:
    """Every element of every stored tensor is in one piece, and in no other's bytes."""
    for i, tensor in enumerate(tensors):
        if int(np.prod([float(n) for n in tensor.shape])) > 10_000 or tensor.same_as:
            continue
        ndim = len(tensor.shape)
        times = np.zeros(tensor.shape, int)
        for owner, offset, shape in boxes:
            if owner == i:
                times[Box(offset[:ndim], shape[:ndim]).slices()] += 1
        assert (times == 1).all()


names = st.text(min_size=1, max_size=12).filter(lambda name: not name.startswith("__shardwise__"))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(
    st.lists(names, unique=True, max_size=6),
    st.lists(json_values, min_size=6, max_size=6),
    st.dictionaries(names, st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    st.one_of(st.none(), st.integers(0, 2**40)),
    st.sampled_from(sorted(DTYPES)),
)
def test_what_is_encoded_is_decoded(
    listed: list[str],
    plain: list[Any],
    metrics: dict[str, float],
    step: int | None,
    dtype: str,
) -> None:
    manifest = Manifest(
        save_id="0123456789abcdef",
        step=step,
        created="2026-01-01T00:00:00+00:00",
        world_size=3,
        metrics=metrics,
        per_rank=tuple(listed[:1]),
        files=(FileEntry("r00000-0123456789abcdef.safetensors", 0, 4100, 4096, 4096, 4096, 7),),
        objects=tuple(ObjectEntry(n, v) for n, v in zip(listed[1:3], plain, strict=False)),
        tensors=encode_tensors_with([TensorEntry(name, dtype, (0, 3)) for name in listed[3:]], []),
    )
    assert decode_manifest(encode_manifest(manifest)) == manifest
    assert json.loads(encode_manifest(manifest))["crc32"] > 0
    layout_of_manifest(manifest)


def test_a_manifest_that_would_not_be_read_is_not_written(
    pristine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = decode_manifest((pristine / "manifest.json").read_bytes())
    monkeypatch.setattr("shardwise.kernel.manifest.manifest.LARGEST_MANIFEST", 1000)
    with pytest.raises(StateError, match="at most 1000 are read: save large plain values as"):
        encode_manifest(manifest)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[tuple[int, Box]]]:
    """Shapes, and boxes within them, which often cover them exactly, as they come from cutting."""
    shapes = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), min_size=1, max_size=3))
    boxes: list[tuple[int, Box]] = []
    for i, shape in enumerate(shapes):
        parts = [Box.whole(shape)] if shape[0] else []
        for dim in draw(st.lists(st.integers(0, 1), max_size=2)):
            parts = [half for part in parts for half in halves(part, dim) if half.size]
        boxes += [(i, part) for part in parts]
    if boxes and draw(st.booleans()):
        at = draw(st.integers(0, len(boxes) - 1))
        tensor, box = boxes.pop(at)
        bounds = list(zip(box.offset, shapes[tensor], strict=True))
        offset = tuple(draw(st.integers(0, n - 1)) for _, n in bounds)
        shape = tuple(draw(st.integers(1, n - o)) for o, (_, n) in zip(offset, bounds, strict=True))
        boxes += [(tensor, Box(offset, shape))] * draw(st.integers(0, 2))
    return shapes, boxes


def halves(box: Box, dim: int) -> list[Box]:
    at = box.shape[dim] // 2
    first, second, offset = list(box.shape), list(box.shape), list(box.offset)
    first[dim], second[dim], offset[dim] = at, box.shape[dim] - at, box.offset[dim] + at
    return [Box(box.offset, tuple(first)), Box(tuple(offset), tuple(second))]


@given(tilings())
def test_cover_is_exact_just_if_every_element_is_in_one_box(
    case: tuple[list[tuple[int, ...]], list[tuple[int, Box]]],
) -> None:
    shapes, boxes = case
    times = [np.zeros(shape, int) for shape in shapes]
    for tensor, box in boxes:
        times[tensor][box.slices()] += 1
    expected = [i for i, each in enumerate(times) if not (each == 1).all()]
    found = find_uncovered_tensors(
        np.array(shapes, np.int64),
        np.array([tensor for tensor, _ in boxes], np.int64),
        np.array([box.offset for _, box in boxes], np.int64).reshape(-1, 2),
        np.array([box.shape for _, box in boxes], np.int64).reshape(-1, 2),
        np.ones(len(shapes), bool),
    )
    assert found.tolist() == expected
