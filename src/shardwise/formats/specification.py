"""A specification as users give it: a text of the language, with numbers, and names of files."""

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
    """What stored arrays mean.

    Attributes:
        rules: what the text says.
        sizes: numbers that the rules declare with `let`.
        files: how the files of the ranks are named, `{axis}` where they are numbered; None if the
            rules are about the global tensors of a checkpoint that is read without them.
    """

    rules: Spec
    sizes: Mapping[str, int]
    files: str | None = None

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in sorted(self.sizes.items()))
        return f"{self.rules.text.text!r} ({sizes}; {self.files})"

    def read(self, tree: Tree) -> Foreign:
        """What the files of the ranks hold, by the rules.

        Raises:
            CheckpointNotFoundError: there are none.
            FormatError: one is missing, or malformed.
            MismatchError: the rules do not fit; `problems` lists everything.
        """
        found = read_rank_files(tree, self.files or "")
        laid = apply_spec(self.rules, found.catalogue, sizes=self.sizes)
        # Plain values of the first rank come along under their own names.
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
        raise StateError(f"{wrong[0]}={sizes[wrong[0]]!r}: a whole number is needed")
    if isinstance(source, str) and ("->" in source or "\n" in source):
        return Specification(parse(source), sizes, files)
    if source in names():
        return Specification(shipped(str(source)), sizes, files)
    path = Path(source)
    if not path.is_file():
        ships = ", ".join(names())
        raise StateError(
            f"{str(source)!r} is no file, no specification that ships ({ships}), and no text of "
            "one, which has a `->` on each line"
        )
    return Specification(parse(path.read_text(), str(path)), sizes, files)
