"""What the tests of shardwise, and those of its users, share."""

from shardwise.testing.gang import Gang, GangError
from shardwise.testing.worker import Outcome

__all__ = ["Gang", "GangError", "Outcome"]
