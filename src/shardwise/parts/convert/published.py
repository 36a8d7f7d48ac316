"""The files of a published model beside its weights: its configuration, and its tokenizer."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from shardwise.kernel.errors import CheckpointNotFoundError
from shardwise.parts.formats.families import CONFIG
from shardwise.parts.formats.file_tree import FileTree

PATTERNS = (
    *(CONFIG, "generation_config.json", "preprocessor_config.json", "processor_config.json"),
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "*.tiktoken", "tekken.json"),
    *("chat_template.jinja", "chat_template.json", "configuration_*.py", "tokenization_*.py"),
)
"""The names of files that are copied, as shell patterns."""
LARGEST = 256 << 20
"""The most bytes of a file that is copied."""
_DTYPE_KEYS = ("dtype", "torch_dtype")
_QUANTIZATION = "quantization_config"


@dataclass(frozen=True, slots=True)
class PublishedFiles:
    """The files beside the weights of a model.

    Attributes:
        tree: the directory of the model.
        contents: the contents of the files by name.
    """

    tree: FileTree
    contents: Mapping[str, bytes]

    @property
    def digest(self) -> str:
        """A text that differs if a file differs."""
        digest = hashlib.blake2b(digest_size=16)
        for name, content in self.contents.items():
            digest.update(f"{name} {len(content)} ".encode())
            digest.update(content)
        return digest.hexdigest()

    def describing(
        self, floats: Iterable[tuple[str, int]], *, quantized: bool
    ) -> tuple[Mapping[str, bytes], tuple[str, ...]]:
        """Return the files for weights that are written, and what differs from the model's own.

        The configuration gets the dtype that most of the written bytes have. Unless the weights
        are quantized, it loses the description of a quantization.

        Args:
            floats: the dtype and the size in bytes of each tensor of floats.
            quantized: whether some of the weights are quantized.
        """
        config: dict[str, Any] = msgspec.json.decode(self.contents[CONFIG])
        lines = []
        if not quantized and config.pop(_QUANTIZATION, None) is not None:
            lines.append(f"{CONFIG}: {_QUANTIZATION}: the written tensors are not quantized")
        sizes: dict[str, int] = {}
        for dtype, size in floats:
            sizes[dtype] = sizes.get(dtype, 0) + size
        changed = bool(lines)
        if sizes and not quantized:
            dtype = max(sizes, key=lambda each: sizes[each])
            key = next((each for each in _DTYPE_KEYS if each in config), _DTYPE_KEYS[0])
            changed |= config.get(key) != dtype
            config[key] = dtype
        if not changed:
            return self.contents, ()
        content = msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n"
        return {**self.contents, CONFIG: content}, tuple(lines)


def read_published_files(base: str | os.PathLike[str]) -> PublishedFiles:
    """Read the files beside the weights of a model.

    Args:
        base: the directory of the model, or its URL.

    Raises:
        CheckpointNotFoundError: the place does not exist, or has no `config.json`.
        FormatError: `config.json` is malformed, or a file is too large.
    """
    tree = FileTree(base)
    if tree.single_file is not None or CONFIG not in tree.sizes:
        raise CheckpointNotFoundError(
            f"base={str(base)[:200]!r} has no {CONFIG}: pass the directory of a Hugging Face model"
        )
    names = [name for name in tree.sizes if any(fnmatchcase(name, pattern) for pattern in PATTERNS)]
    contents = {name: tree.read(name, limit=LARGEST) for name in names if "/" not in name}
    tree.decode_json(contents[CONFIG], CONFIG, dict[str, Any], "an object of JSON")
    return PublishedFiles(tree, contents)
