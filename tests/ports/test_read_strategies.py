"""Read strategies: those of shardwise, and the one of docs/ports/read_strategy.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from shardwise.ports.read_strategy import Group, ReadAlone, ReadStrategy
from shardwise.testing.read_strategy_suite import ReadStrategySuite

PAGE = Path(__file__).parents[2] / "docs" / "ports" / "read_strategy.md"


def module_of_page() -> dict[str, Any]:
    """The names that the example of the page defines."""
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[:1]
    names: dict[str, Any] = {}
    exec(source, names)
    return names


class TestReadAlone(ReadStrategySuite):
    def strategy(self, group: Group) -> ReadStrategy:
        return ReadAlone()


class TestReadTogether(ReadStrategySuite):
    """The strategy of loads that no plug-in wants."""

    def strategy(self, group: Group) -> ReadStrategy:
        return None  # type: ignore[return-value]


class TestReadInTurns(ReadStrategySuite):
    def strategy(self, group: Group) -> ReadStrategy:
        strategy: ReadStrategy = module_of_page()["choose"](group, None)
        return strategy
