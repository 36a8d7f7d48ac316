"""Give the tensors of a model of Megatron-Core the names and shapes of Hugging Face's model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from shardwise.kernel.checkpoint import Checkpoint
from shardwise.kernel.manifest.layout import Layout
from shardwise.kernel.store import Files
from shardwise.parts.convert.published import PublishedFiles
from shardwise.parts.formats.families import (
    Choice,
    are_of_megatron,
    choose_by_arguments,
    choose_by_config,
)
from shardwise.parts.formats.language.arithmetic import Expression
from shardwise.parts.formats.language.rules import Pattern, Rule, Spec, Target
from shardwise.parts.formats.remap import remap
from shardwise.parts.formats.specs import load_builtin

ARGUMENTS = ("args", "common.args")
"""The names of the arguments of a training, in checkpoints of Megatron-LM."""
_MODEL_KEYS = ("model", "module")
"""The keys of models that the built-in specifications know."""


def name_as_published(
    source: Files, layout: Layout, published: PublishedFiles | None, model_key: str
) -> tuple[Layout, tuple[str, ...]]:
    """Return the layout with the names of Hugging Face, and lines for the report.

    If the model has not Megatron-Core's names, nothing changes. The same is true if nothing says
    which model of Hugging Face it is; then a line says how to.

    Args:
        source: the files of the checkpoint.
        layout: its layout.
        published: the files of the Hugging Face model, which say what model it is. Without them,
            the arguments of the training do, if the checkpoint has them.
        model_key: the key of the model in the checkpoint.

    Raises:
        MismatchError: the model does not fit to its configuration.
        FormatError, StateError: no specification belongs to the configuration.
    """
    names = [tensor.name for tensor in layout.tensors]
    if not are_of_megatron(names, model_key):
        return layout, ()
    if model_key not in _MODEL_KEYS:
        choice = None
    elif published is not None:
        choice = choose_by_config(published.tree, "hf")
    else:
        choice = choose_by_arguments(_arguments_of(source, layout))
    if choice is None:
        return layout, (
            "names of Hugging Face: the names are Megatron-Core's, and nothing says what model it "
            "is: pass the directory of the Hugging Face model as base= (on the command line, "
            "--base), or a specification, and name the model 'model' in the state",
        )
    numbers = _with_predicted_tokens(choice, names)
    rules = _keeping_other_states(load_builtin(choice.name), names, model_key)
    lines = []
    if choice.vocabulary_is_padded:
        lines.append(
            "the size of the vocabulary: the arguments of the training lack vocab_size, so the "
            "padding of the vocabulary is written too: pass base= or spec= to cut it"
        )
    return remap(str(source), layout, rules, numbers), tuple(lines)


def _arguments_of(source: Files, layout: Layout) -> Mapping[str, Any]:
    """Return the arguments by name. A checkpoint holds them as one value, or each as a value."""
    checkpoint = Checkpoint(source, layout, verify=True)
    found: dict[str, Any] = {}
    for entry in layout.objects:
        for name in ARGUMENTS:
            if entry.name == name and isinstance(value := checkpoint[name], Mapping):
                found |= value
            elif entry.name.startswith(f"{name}."):
                found[entry.name.removeprefix(f"{name}.")] = checkpoint[entry.name]
    return found


def _with_predicted_tokens(choice: Choice, names: Iterable[str]) -> Mapping[str, int]:
    """Return the numbers, with whether the checkpoint itself has layers for further tokens."""
    if "mtp" not in choice.numbers:
        return choice.numbers
    return {**choice.numbers, "mtp": int(any(".mtp.layers." in name for name in names))}


def _keeping_other_states(rules: Spec, names: Iterable[str], model_key: str) -> Spec:
    """Add rules to a specification that leave tensors beside the model as they are."""
    keys = {name.partition(".")[0] for name in names} - {model_key}
    star = Expression("text", 0, ("*0",))
    patterns = [Pattern(parts) for key in sorted(keys) for parts in ((key,), (f"{key}.", star))]
    unchanged = (Rule(pattern=each, targets=(Target(each),)) for each in patterns)
    return replace(rules, rules=(*rules.rules, *unchanged))
