"""Hugging Face safetensors: files of bounded size, and an index if there are several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from shardwise.convert.plan import Chosen, Output, Part, Sums, Target, Written, split
from shardwise.errors import StateError
from shardwise.manifest.dtypes import DTYPES

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
ALIGNMENT = 8


def huggingface_target(chosen: Chosen) -> Target:
    """Plan the files of a model as `transformers` does. Tied tensors are stored once.

    A tensor larger than `max_file` gets a separate file.

    Raises:
        StateError: safetensors does not support a dtype.
    """
    published = chosen.model()
    stored = {each.entry.name for each in published if each.entry.same_as is None}
    left_out = tuple(
        f"{each.name}: tied to {each.entry.same_as}, which is stored"
        for each in published
        if each.entry.same_as in stored
    )
    kept = [each for each in published if each.entry.same_as not in stored]
    files = split(kept, lambda each: each.part.size, chosen.max_file)
    names = (
        [SINGLE]
        if len(files) == 1
        else [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    )
    outputs = tuple(_file(name, part) for name, part in zip(names, files, strict=True))

    def finals(_: Mapping[str, Sums]) -> Mapping[str, bytes]:
        config = {} if chosen.config is None else {CONFIG: chosen.config}
        if len(files) == 1:
            return config
        places = {each.name: name for name, part in zip(names, files, strict=True) for each in part}
        total = sum(each.part.size for each in kept)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        return config | {INDEX: msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n"}

    return Target(outputs, finals, (*left_out, *chosen.beside_model()))


def _file(name: str, tensors: Sequence[Written]) -> Output:
    # Wider types first, so that all tensors are aligned.
    order = sorted(tensors, key=lambda each: -DTYPES[each.dtype].itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    parts: list[Part] = []
    at = 0
    for each in order:
        code = DTYPES[each.dtype].code
        if code is None:
            raise StateError(
                f"{each.name}: safetensors does not support {each.dtype}: leave it out with skip=, "
                "or choose another format"
            )
        part = each.part
        offsets = [at, at + part.size]
        header[each.name] = {"dtype": code, "shape": part.box.shape, "data_offsets": offsets}
        at += part.size
        if part.size:
            parts.append(part)
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % ALIGNMENT)
    return Output(name, (len(encoded).to_bytes(8, "little") + encoded, *parts))
