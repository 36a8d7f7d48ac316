"""The command line: a file a command, and those that they share."""

from shardwise.cli.app import main

__all__ = ["main"]
