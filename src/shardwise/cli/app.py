"""The command line application: its commands, and how errors become exit statuses."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import shardwise
from shardwise.cli.agent import agent
from shardwise.cli.diff import diff
from shardwise.cli.export import average, export, merge_lora
from shardwise.cli.inspect import inspect
from shardwise.cli.ls import ls
from shardwise.cli.plan_interval import plan_interval
from shardwise.cli.rm import rm
from shardwise.cli.terminal import complain
from shardwise.cli.verify import verify
from shardwise.errors import CorruptionError, ShardwiseError

DAMAGED = 1
FAILED = 2
PIPE_CLOSED = 141  # as a shell reports SIGPIPE


class Commands(TyperGroup):
    """Commands whose errors end in a message on stderr and an exit status, without a traceback."""

    def invoke(self, ctx: Any) -> object:
        """Run the command. Exit with 1 if a checkpoint is damaged, and with 2 on other errors."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(PIPE_CLOSED) from error
        except (ShardwiseError, OSError) as error:
            complain(_message(error))
            damaged = isinstance(error, CorruptionError)
            raise typer.Exit(DAMAGED if damaged else FAILED) from error


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, ShardwiseError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardwise {shardwise.__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (ls, inspect, verify, diff, export, average, merge_lora, rm, plan_interval):
    app.command()(command)
app.add_typer(agent, name="agent")


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """List, inspect, verify, compare, export, combine and remove checkpoints.

    Reads checkpoints of shardwise, PyTorch DCP, DeepSpeed, Megatron, Hugging Face, Lightning and
    others (see docs/formats.md). Run `shardwise COMMAND --help` for help on a command.

    \b
    Exit status:
      0  success
      1  a checkpoint is damaged, or two checkpoints differ
      2  the command failed or was called incorrectly
    """


def main() -> None:
    """Run the command line with this process's arguments."""
    app(prog_name="shardwise")
