"""The command line application: the list of commands, and the exit statuses of errors."""

from __future__ import annotations

import ast
import io
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

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

_STRING = r"'[^'\\]*'"
_ARGUMENT = re.compile(
    rf"(?<![\w./-])(?P<name>[a-z_]+)=(?P<value>{_STRING}|\[(?:{_STRING}(?:, {_STRING})*)?\]|-?\d+)?"
    r"(?=[\s:;,.)]|$)"
)
"""An argument of Python in a message: `format='hf'`, `only=['model.*']`, `step=-1` or `format=`."""

EXIT_DAMAGED = 1
EXIT_FAILED = 2
EXIT_PIPE_CLOSED = 141  # the status that a shell reports for SIGPIPE: 128 + 13


class Command(TyperCommand):
    """A command whose errors name its options: `--to xx` instead of `to='xx'`."""

    def invoke(self, ctx: Any) -> object:
        """Run the command. Exit as `CommandGroup.invoke` does."""
        with _exit_on_error(self.params):
            return super().invoke(ctx)


class CommandGroup(TyperGroup):
    """Runs commands. On an error, it prints a message to stderr instead of a traceback."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the arguments. This prints the help and the version."""
        with _exit_if_pipe_is_closed():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> object:
        """Run the command. Exit with 1 if a checkpoint is damaged, and with 2 on other errors."""
        with _exit_if_pipe_is_closed(), _exit_on_error():
            return super().invoke(ctx)


@contextmanager
def _exit_on_error(parameters: Iterable[Any] = ()) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except (ShardwiseError, OSError) as error:
        print_error(_name_options(_error_message(error), parameters))
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


def _name_options(message: str, parameters: Iterable[Any]) -> str:
    """Replace the arguments of Python in an error message by the options of a command.

    For example `to='xx'` by `--to xx`, `leave out step=` by `leave out --step`. If a command has an
    option for each of several checkpoints, all are named: `--format-a` and `--format-b`.
    """
    options = [name for each in parameters for name in each.opts if name.startswith("--")]

    def replace(match: re.Match[str]) -> str:
        option = "--" + match["name"].replace("_", "-")
        names = [each for each in options if each in (option, f"{option}-a", f"{option}-b")]
        if not names or match["value"] is None:
            return " or ".join(names) or match[0]
        value = ast.literal_eval(match["value"])
        values = [shlex.quote(str(each)) for each in (value if type(value) is list else [value])]
        uses = [" ".join(f"{name} {each}" for each in values) or f"no {name}" for name in names]
        return " or ".join(uses)

    return _ARGUMENT.sub(replace, message)


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
    app.command(cls=Command)(command)
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
      1  a checkpoint is damaged, or two checkpoints differ. `ls` lists
         damaged checkpoints, and exits with 0
      2  the command failed or was called incorrectly, or `verify` found
         no checksums
    141  nobody read all of the output, as in `shardwise verify ROOT | head -1`
    """


def main() -> None:
    """Run the command line with this process's arguments."""
    for stream in (sys.stdout, sys.stderr):  # a locale may lack characters of a name, or "✓"
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app(prog_name="shardwise")
