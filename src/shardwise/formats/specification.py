"""`sw.spec`: a specification with values for its numbers, and the pattern of file names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import StateError
from shardwise.formats.build import Builder
from shardwise.formats.foreign import Foreign
from shardwise.formats.language import Spec, apply_spec, parse
from shardwise.formats.rankfiles import read_rank_files
from shardwise.formats.specs import names, shipped
from shardwise.formats.tree import Tree


@dataclass(frozen=True, slots=True)
class Specification:
    """A specification of how stored arrays make up global tensors.

    Attributes:
        rules: the parsed text.
        sizes: values of numbers that the text declares with `let`.
        files: the pattern of the ranks' file names, with `{axis}` for the number along an axis;
            None to apply the rules to the global tensors of a checkpoint of any format.
    """

    rules: Spec
    sizes: Mapping[str, int]
    files: str | None = None

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in sorted(self.sizes.items()))
        return f"{self.rules.text.text!r} ({sizes}; {self.files})"

    def read(self, tree: Tree) -> Foreign:
        """Read the files of the ranks.

        Raises:
            CheckpointNotFoundError: no file matches the pattern.
            FormatError: a file is missing or malformed.
            MismatchError: the rules do not fit; `problems` lists everything that is wrong.
        """
        found = read_rank_files(tree, self.files or "")
        laid = apply_spec(self.rules, found.catalogue, sizes=self.sizes)
        # Plain values are those of the first rank.
        builder = Builder.of(laid)
        builder.left_out += found.left_out
        for name, value in found.values.items():
            builder.add_value(name, value)
        return builder.build(f"files of ranks, {self.files}", replica_names=laid.replica_names)


def spec(
    source: str | os.PathLike[str], *, files: str | None = None, **sizes: int
) -> Specification:
    """Parse a specification, which says how stored arrays make up global tensors.

    docs/language.md describes the language. Pass the result as `spec=` to `open` or `load`.

    Args:
        source: the name of a built-in specification (`"megatron_llama"`), a path, or the text.
        files: the pattern of the ranks' file names, relative to the place that is opened. Braces
            stand for the number of an axis of ranks: `"mp_rank_{tp}/model_optim_rng.pt"`. Without
            it, the specification applies to the global tensors of the checkpoint.
        sizes: the numbers that the text declares with `let`.

    Raises:
        SpecError: the text has an error; the message shows the line and a caret.
        StateError: the file does not exist.
    """
    wrong = [name for name, size in sizes.items() if type(size) is not int]
    if wrong:
        raise StateError(f"{wrong[0]}={sizes[wrong[0]]!r}: expected a whole number")
    if isinstance(source, str) and ("->" in source or "\n" in source):
        return Specification(parse(source), sizes, files)
    if source in names():
        return Specification(shipped(str(source)), sizes, files)
    path = Path(source)
    if not path.is_file():
        ships = ", ".join(names())
        raise StateError(
            f"{str(source)!r} is neither a file, nor a built-in specification ({ships}), nor the "
            "text of one, which has a `->` on each line"
        )
    return Specification(parse(path.read_text(), str(path)), sizes, files)
