"""Plan Hugging Face safetensors: files of bounded size, and an index if there are several."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import msgspec

from shardwise.kernel.errors import StateError
from shardwise.kernel.manifest.dtypes import DTYPES
from shardwise.parts.convert.plan import (
    ExportContents,
    ExportFiles,
    OutputFile,
    TargetTensor,
    TensorPart,
    divide_among_files,
)
from shardwise.parts.convert.targets.torchao_safetensors import name_as_torchao
from shardwise.parts.formats.containers.safetensors import describe_array

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ALIGNMENT = 8
PEFT_PREFIX = "base_model.model."
_OF_ADAPTERS = ("lora_", "ia3_", "hada_", "lokr_", "oft_", "hra_", "trainable_tokens_delta")
"""How the names of PEFT's dicts of adapters begin."""


def plan_huggingface_files(contents: ExportContents) -> ExportFiles:
    """Plan the files of a model, as `transformers` names them. Tied tensors are stored once.

    A tensor larger than `max_file` gets a separate file. Tensors that wrap others get the names of
    torchao.

    Raises:
        StateError: the checkpoint has no tensor below the model key, or only the trained part of
            the model, or a model with adapters of PEFT; or safetensors does not support the dtype
            of a tensor.
    """
    model = contents.model_tensors()
    contents.refuse_partial_model()
    for each in model:
        if each.name.startswith(PEFT_PREFIX) or split_adapter_name(each.name):
            raise StateError(
                f"{each.entry.name}: a name of a model with adapters of PEFT, which transformers "
                "does not load: to publish the adapter, pass to='peft' (on the command line, --to "
                "peft); to publish the merged model, save and export model.merge_and_unload()"
            )
    composites = contents.composites_of_model()
    model, metadata = name_as_torchao(model, composites, contents.model_key)
    stored = {each.entry.name for each in model if each.entry.same_as is None}
    left_out = tuple(
        f"{each.name}: tied to {each.entry.same_as}, which is stored"
        for each in model
        if each.entry.same_as in stored
    )
    written = [each for each in model if each.entry.same_as not in stored]
    files = divide_among_files(written, lambda each: each.part.size, contents.max_file)
    names = (
        [SINGLE]
        if len(files) == 1
        else [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    )
    tensor_files = tuple(
        plan_safetensors_file(name, file_tensors, metadata)
        for name, file_tensors in zip(names, files, strict=True)
    )

    final_files = {} if len(files) == 1 else {INDEX: _encode_index(names, files)}
    left_out += contents.describe_left_out({each.name for each in composites})
    return ExportFiles(tensor_files, lambda sums: final_files, left_out)


def split_adapter_name(name: str, adapters: Collection[str] = ()) -> tuple[str, str] | None:
    """Return the adapter of PEFT to which a tensor belongs, and its name in PEFT's files.

    The name lacks the adapter: `up.lora_A.default.weight` becomes `up.lora_A.weight`.

    Args:
        name: the name of the tensor.
        adapters: the names of the adapters. Default: any name.
    """
    parts = name.split(".")
    for index, part in enumerate(parts[:-1]):
        is_copy = part == "modules_to_save"
        if not is_copy and not part.startswith(_OF_ADAPTERS):
            continue
        adapter, rest = parts[index + 1], parts[index + 2 :]
        if adapter not in adapters if adapters else adapter in ("weight", "bias"):
            return None
        if part == "lora_magnitude_vector" and rest == ["weight"]:
            rest = []
        return adapter, ".".join([*parts[: index + (not is_copy)], *rest])
    return None


def _encode_index(names: Sequence[str], files: Sequence[Sequence[TargetTensor]]) -> bytes:
    """Return the index, which says in which file each tensor is."""
    file_of_tensor = {
        each.name: name
        for name, file_tensors in zip(names, files, strict=True)
        for each in file_tensors
    }
    index = {
        "metadata": {"total_size": sum(each.part.size for file in files for each in file)},
        "weight_map": dict(sorted(file_of_tensor.items())),
    }
    return msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n"


def plan_safetensors_file(
    name: str, tensors: Sequence[TargetTensor], metadata: Mapping[str, str] = MappingProxyType({})
) -> OutputFile:
    """Plan one file of safetensors.

    Args:
        name: its path below the target directory.
        tensors: the tensors.
        metadata: what the file says besides its format.

    Raises:
        StateError: safetensors does not support the dtype of a tensor.
    """
    # Larger elements first, so that all tensors are aligned.
    order = sorted(tensors, key=lambda each: -DTYPES[each.dtype].itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    parts: list[TensorPart] = []
    offset = 0
    for each in order:
        part = each.part
        entry = describe_array(each.dtype, part.box.shape, offset)
        if entry is None:
            raise StateError(
                f"{each.name}: safetensors does not support {each.dtype}: leave it out with skip=, "
                "or choose another format"
            )
        header[each.name] = entry
        offset += part.size
        if part.size:
            parts.append(part)
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % ALIGNMENT)
    return OutputFile(name, (len(encoded).to_bytes(8, "little") + encoded, *parts))
