"""`python -m shardwise`: the command line."""

from __future__ import annotations

from shardwise.parts.cli import main

if __name__ == "__main__":
    main()
