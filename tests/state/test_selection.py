"""Which names are chosen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardwise.state.selection import is_below


@given(st.text("ab.", max_size=6), st.sets(st.text("ab.", max_size=4), max_size=4))
def test_below_means_as_a_part_of_the_dotted_name(name: str, scope: set[str]) -> None:
    wanted = any(name == each or name.startswith(each + ".") for each in scope)
    assert is_below(name, scope) == wanted
