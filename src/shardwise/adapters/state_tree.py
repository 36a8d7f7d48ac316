"""An optimizer's state of one parameter, which may be nested, as dotted keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def leaves_of(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Leaves by dotted keys; dicts are taken apart, everything else is a leaf."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and all(isinstance(k, str) for k in value):
            yield from leaves_of(value, f"{name}.")
        else:
            yield name, value


def rebuilt(leaves: Mapping[str, object]) -> dict[str, object]:
    """The tree of dotted keys again."""
    tree: dict[str, object] = {}
    for name, value in leaves.items():
        *path, last = name.split(".")
        here = tree
        for part in path:
            child = here.setdefault(part, {})
            if not isinstance(child, dict):
                child = here[part] = {}
            here = child
        here[last] = value
    return tree
