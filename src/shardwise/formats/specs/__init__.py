"""The built-in specifications, one in each file. docs/language.md describes the language."""

from __future__ import annotations

from importlib.resources import files

from shardwise.errors import SpecError
from shardwise.formats.language import Spec, parse

SUFFIX = ".spec"


def builtin_names() -> list[str]:
    """Return the names of the built-in specifications."""
    names = (file.name for file in files(__name__).iterdir())
    return sorted(name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))


def load_builtin(name: str) -> Spec:
    """Parse a built-in specification.

    Raises:
        SpecError: no specification has this name.
    """
    if name not in builtin_names():
        message = f"no built-in specification has this name; there are {', '.join(builtin_names())}"
        raise SpecError(message, source=name[:200], line=1, column=1, text="")
    text = files(__name__).joinpath(name + SUFFIX).read_text(encoding="utf-8")
    return parse(text, name + SUFFIX)
