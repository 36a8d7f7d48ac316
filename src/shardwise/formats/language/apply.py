"""Apply a specification to the arrays in the files of all ranks."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.errors import LayoutError, MismatchError
from shardwise.formats.foreign import Catalogue
from shardwise.formats.language.arithmetic import Environment
from shardwise.formats.language.assemble import assemble_checkpoint
from shardwise.formats.language.match import add_captured_numbers, evaluate_lets, match_rules
from shardwise.formats.language.rules import Spec
from shardwise.formats.language.tensors import Tensors
from shardwise.manifest.layout import Layout


def apply_spec(
    spec: Spec,
    catalogue: Catalogue,
    *,
    sizes: Mapping[str, int] | None = None,
    checkpoint: str = "the checkpoint",
) -> Layout:
    """Return the layout that a specification makes of the arrays of all ranks, without its files.

    Every element of every tensor is there exactly once, apart from replicas. Every stored array is
    used or skipped.

    Args:
        sizes: values for numbers that the specification declares with `let`. They override the
            declared values.
        checkpoint: the path of the checkpoint, for messages.

    Raises:
        MismatchError: the specification does not fit; `problems` lists everything that is wrong.
    """
    problems = []
    try:
        numbers = evaluate_lets(spec, sizes or {})
        ranks = {**dict.fromkeys(spec.ranks, 1), **catalogue.axes}
        environment = Environment(numbers, {**numbers, **ranks})
        all_matches, unmatched = match_rules(spec, catalogue, environment)
        tensors = Tensors(spec, catalogue, add_captured_numbers(environment, all_matches))
        for matches in all_matches:
            tensors.apply_rule(matches)
        layout = assemble_checkpoint(tensors, all_matches, unmatched)
        problems = tensors.problems
    except MismatchError as error:
        problems = error.problems
    except LayoutError as error:
        problems = [str(error)]
    if problems:
        summary = (
            f"{spec.source.source} does not fit {checkpoint}: correct the specification, or copy "
            "the checkpoint again if files are missing:"
        )
        raise MismatchError(summary, list(dict.fromkeys(problems)))
    return layout
