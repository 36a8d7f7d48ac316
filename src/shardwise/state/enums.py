"""Members of enums as the fields of a JSON object; found again only in what is imported."""

from __future__ import annotations

import enum
import sys
from types import ModuleType

from shardwise.state.numbers import Fields, text_of


def member_fields(member: enum.Enum) -> Fields | None:
    """`class` and `v`; None of a member that could not be found again by name."""
    made = type(member)
    place = f"{made.__module__}:{made.__qualname__}"
    if _imported(place) is not made or member.name not in made.__members__:
        return None
    return {"class": place, "v": member.name}


def member_of(fields: Fields) -> enum.Enum:
    """The member. Imports nothing and runs nothing.

    Raises:
        LookupError: there is no such enum in what this process has imported, or no such member.
    """
    place, name = text_of(fields["class"]), text_of(fields["v"])
    made = _imported(place)
    if not (isinstance(made, type) and issubclass(made, enum.Enum)):
        raise LookupError(f"{place[:200]} is no enum that is imported here: import it first")
    if name not in made.__members__:
        raise LookupError(f"{place} has no member {name[:200]!r}")
    return made.__members__[name]


def _imported(place: str) -> object:
    module, _, qualname = place.partition(":")
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        found = vars(found).get(part) if isinstance(found, (ModuleType, type)) else None
    return found
