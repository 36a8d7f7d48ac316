"""The built-in specifications, a file each; docs/language.md describes the language."""

from __future__ import annotations

from importlib.resources import files

from shardwise.errors import SpecError
from shardwise.formats.language import Spec, parse

SUFFIX = ".spec"


def names() -> list[str]:
    """Return the names of the built-in specifications."""
    found = (file.name for file in files(__name__).iterdir())
    return sorted(name.removesuffix(SUFFIX) for name in found if name.endswith(SUFFIX))


def shipped(name: str) -> Spec:
    """Return a built-in specification.

    Raises:
        SpecError: no specification has this name.
    """
    if name not in names():
        what = f"no built-in specification has this name; there are {', '.join(names())}"
        raise SpecError(what, source=name[:200], line=1, column=1, text="")
    return parse(files(__name__).joinpath(name + SUFFIX).read_text(), name + SUFFIX)
