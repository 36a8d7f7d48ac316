"""The command line application: the list of commands, and the exit statuses of errors."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import shardwise
from shardwise import CorruptionError, ShardwiseError
from shardwise.parts.cli.agent import agent
from shardwise.parts.cli.diff import diff
from shardwise.parts.cli.export import export
from shardwise.parts.cli.inspect import inspect
from shardwise.parts.cli.ls import ls
from shardwise.parts.cli.report import report
from shardwise.parts.cli.rm import rm
from shardwise.parts.cli.terminal import print_error
from shardwise.parts.cli.verify import verify

EXIT_DAMAGED = 1
EXIT_FAILED = 2
EXIT_PIPE_CLOSED = 141  # the status that a shell reports for SIGPIPE: 128 + 13


class CommandGroup(TyperGroup):
    """Runs commands. On an error, it prints a message to stderr instead of a traceback."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the arguments. This prints the help and the version."""
        with _exit_if_pipe_is_closed():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> object:
        """Run the command. Exit with 1 if a checkpoint is damaged, and with 2 on other errors."""
        with _exit_if_pipe_is_closed():
            try:
                return super().invoke(ctx)
            except BrokenPipeError:
                raise
            except (ShardwiseError, OSError) as error:
                print_error(_error_message(error))
                damaged = isinstance(error, CorruptionError)
                raise typer.Exit(EXIT_DAMAGED if damaged else EXIT_FAILED) from error


@contextmanager
def _exit_if_pipe_is_closed() -> Iterator[None]:
    """Exit quietly, as other tools do, if nobody reads the output, as in `... | head -1`."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_PIPE_CLOSED) from error


def _error_message(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, ShardwiseError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"shardwise {shardwise.__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=CommandGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (ls, inspect, verify, diff, export, report, rm):
    app.command()(command)
app.add_typer(agent, name="agent")


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """List, inspect, verify, compare, export and remove checkpoints, and report on their saves.

    Reads checkpoints of shardwise, PyTorch DCP, DeepSpeed, Megatron, Hugging Face, Lightning and
    others. Run `shardwise COMMAND --help` for help on a command.

    \b
    Exit status:
      0  success
      1  a checkpoint is damaged, or two checkpoints differ
      2  the command failed or was called incorrectly
    141  nobody read all of the output, as in `shardwise verify ROOT | head -1`
    """


def main() -> None:
    """Run the command line with this process's arguments."""
    for stream in (sys.stdout, sys.stderr):  # a locale may lack characters of a name, or "✓"
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app(prog_name="shardwise")
