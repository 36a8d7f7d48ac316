"""Specifications that ship with the library, one file each, in the language of docs/language.md."""

from __future__ import annotations

from importlib.resources import files

from shardwise.errors import SpecError
from shardwise.formats.language import Spec, parse

SUFFIX = ".spec"


def names() -> list[str]:
    """What there is."""
    found = (file.name for file in files(__name__).iterdir())
    return sorted(name.removesuffix(SUFFIX) for name in found if name.endswith(SUFFIX))


def shipped(name: str) -> Spec:
    """A specification by its name.

    Raises:
        SpecError: there is none of this name.
    """
    if name not in names():
        what = f"no specification of this name ships; there are {', '.join(names())}"
        raise SpecError(what, source=name[:200], line=1, column=1, text="")
    return parse(files(__name__).joinpath(name + SUFFIX).read_text(), name + SUFFIX)
