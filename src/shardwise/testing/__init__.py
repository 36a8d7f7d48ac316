"""Tools for the tests of shardwise and of its users."""

from shardwise.testing.gang import Gang, GangError
from shardwise.testing.worker import Outcome

__all__ = ["Gang", "GangError", "Outcome"]
