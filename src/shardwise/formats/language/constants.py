"""What a specification declares, as numbers."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.errors import LayoutError, MismatchError
from shardwise.formats.language.axes import parts_alone
from shardwise.formats.language.numbers import Known, Value, evaluate
from shardwise.formats.language.rules import Declared, Rule, Spec


def constants_of(spec: Spec, given: Mapping[str, int]) -> dict[str, Value]:
    """The numbers that `let` declares; those that are given from outside count first.

    Raises:
        MismatchError: a number is neither declared nor given, or given but not declared.
    """
    found: dict[str, Value] = dict(given)
    names = [name for name, _ in spec.lets]
    extra = [name for name in given if name not in names]
    problems = [f"{name} is given, but not declared with `let`" for name in extra]
    for name, declared in spec.lets:
        if name in given:
            continue
        if declared is None:
            problems.append(f"{name} is declared without a number, so it must be given")
            continue
        try:
            found[name] = number_or_list(declared, Known(constants=found))
        except LayoutError as error:
            problems.append(f"let {name}: {error}")
    if problems:
        raise MismatchError(f"{spec.text.source}: its numbers are not all known:", problems)
    return found


def rank_sizes(spec: Spec, axes: Mapping[str, int]) -> dict[str, int]:
    """How many ranks there are along each axis; those that a checkpoint does not have are 1.

    Raises:
        MismatchError: the specification says otherwise.
    """
    problems = [
        f"{name} is {axes.get(name, 1)} here, and {size} in the specification"
        for name, size in spec.ranks
        if size is not None and size != axes.get(name, 1)
    ]
    if problems:
        raise MismatchError(f"{spec.text.source} is for other ranks:", problems)
    return {**dict.fromkeys((name for name, _ in spec.ranks), 1), **axes}


def rule_sizes(rule: Rule, known: Known) -> dict[str, Value]:
    """Sizes that a rule declares for its axes; parts of sums for which nothing does have 1.

    Raises:
        LayoutError: one depends on something unknown.
    """
    sizes: dict[str, Value] = {}
    for name, declared in rule.sizes:
        sizes[name] = number_or_list(declared, known)
    for shape in rule.shapes():
        for dim in shape.dims:
            for part in parts_alone(dim.node):
                if part.size is None and part.name not in known.constants:
                    sizes.setdefault(part.name, 1)
    return sizes


def number_or_list(declared: Declared, known: Known) -> Value:
    """The value of what stands after `=`.

    Raises:
        LayoutError: it depends on something unknown.
    """
    if isinstance(declared, tuple):
        return tuple(evaluate(item, known) for item in declared)
    return evaluate(declared, known)
