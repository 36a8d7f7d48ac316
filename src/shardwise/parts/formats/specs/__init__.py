"""The built-in specifications, one in each file. docs/language.md describes the language."""

from __future__ import annotations

from importlib.resources import files

from shardwise.parts.formats.language import Spec, parse

SUFFIX = ".spec"


def builtin_names() -> list[str]:
    """Return the names of the built-in specifications."""
    names = (file.name for file in files(__name__).iterdir())
    return sorted(name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))


def load_builtin(name: str) -> Spec:
    """Parse a built-in specification."""
    text = files(__name__).joinpath(name + SUFFIX).read_text(encoding="utf-8")
    return parse(text, name + SUFFIX)
