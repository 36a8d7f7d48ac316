"""The `shardwise` command line: one module for each command, and the modules that they share."""

from shardwise.parts.cli.app import main

__all__ = ["main"]
