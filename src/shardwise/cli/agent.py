"""`shardwise agent`: run, show, clear or stop the agent of this node."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli import formatting as fmt
from shardwise.cli.agent_tables import show_status, show_stored_runs
from shardwise.cli.terminal import AsJson, print_json, stdout_console
from shardwise.errors import StoreError
from shardwise.memory.agent.status import describe_run, read_status
from shardwise.memory.home import Home
from shardwise.memory.identity import LOOPBACK
from shardwise.memory.options import DEFAULT_DIRECTORY, Tls
from shardwise.memory.rank_locks import is_training
from shardwise.memory.reclaim import clear_run
from shardwise.memory.spawn import end_agent, redirect_output_to_log, running_agent

agent = typer.Typer(no_args_is_help=True, help="Run, show, clear or stop the agent of this node.")
Directory = Annotated[
    Path, typer.Option("--dir", metavar="PATH", help="The directory of the node's snapshots.")
]
Certificate = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The certificate of this node (PEM).")
]
Key = Annotated[Path | None, typer.Option(metavar="FILE", help="The key of --tls-cert (PEM).")]
Authority = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The CA that signed all nodes' certificates."),
]
Prefetcher = Annotated[
    str | None,
    typer.Option(metavar="ROOT", help="Read the newest checkpoint of this root into memory."),
]
Ranks = Annotated[
    str | None,
    typer.Option(metavar="A-B", help="For --prefetch: only files of these ranks, such as 8-15."),
]


@agent.command()
def run(
    directory: Directory = Path(DEFAULT_DIRECTORY),
    interface: Annotated[
        str,
        typer.Option(metavar="ADDR", help="Address or interface that other nodes connect to."),
    ] = LOOPBACK,
    port: Annotated[
        int,
        typer.Option(metavar="N", help="The port. 0: the previous agent's port, or a free one."),
    ] = 0,
    domain: Annotated[
        str,
        typer.Option(metavar="NAME", help="The failure domain of this node, for example its rack."),
    ] = "",
    tls_cert: Certificate = None,
    tls_key: Key = None,
    tls_ca: Authority = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The secret that all nodes share. Default: made in --dir."
        ),
    ] = None,
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="Exit when no snapshots and no training remain.")
    ] = False,
    prefetch: Prefetcher = None,
    ranks: Ranks = None,
    log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Log to this file (at most 2 MB) instead of stderr."),
    ] = None,
) -> None:
    """Run the agent of this node.

    Training starts an agent automatically if none is running. Use this command, next to torchrun
    or in a separate container, if an agent that training starts would be killed together with it.
    On SIGTERM the agent finishes its current writes, within 20 seconds, and exits.
    """
    from shardwise.memory.agent.process import AgentOptions, run_agent
    from shardwise.memory.prefetched import PrefetchOptions

    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
        handlers=[logging.StreamHandler() if log is None else redirect_output_to_log(log)],
        force=True,
    )
    options = AgentOptions(
        interface=interface,
        port=port,
        domain=domain,
        tls=_tls_from_options(tls_cert, tls_key, tls_ca),
        secret=secret_file,
        until_idle=until_idle,
        prefetch=None if prefetch is None else PrefetchOptions.parse(prefetch, ranks),
    )
    if not run_agent(directory, options):
        logging.shutdown()
        os._exit(0)  # an ordinary exit would wait for threads that are still working


@agent.command()
def status(
    directory: Directory = Path(DEFAULT_DIRECTORY),
    as_json: AsJson = False,
    tls_cert: Certificate = None,
    tls_key: Key = None,
    tls_ca: Authority = None,
) -> None:
    """Show the agent of this node and its snapshots.

    For each run and step, shows how long it took to commit the snapshot, to protect it on other
    nodes and to persist it to storage. For each of these stages, also shows how many steps it is
    behind the newest snapshot.
    """
    node = read_status(Home(directory), _tls_from_options(tls_cert, tls_key, tls_ca))
    if as_json:
        print_json(node)
    else:
        show_status(node, stdout_console())


@agent.command()
def clear(
    directory: Directory = Path(DEFAULT_DIRECTORY),
    run_id: Annotated[
        list[str] | None,
        typer.Option("--run", metavar="ID", help="Clear this run. Repeatable."),
    ] = None,
    all_runs: Annotated[bool, typer.Option("--all", help="Clear all runs of this node.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also clear runs that are training on this node.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove the snapshots of runs from the memory of this node.

    Without --run or --all, lists the runs and removes nothing. Checkpoints in storage are kept.
    Refuses to clear a run that is training on this node, unless --force is given. Other nodes keep
    their snapshots: run this command on each of them.
    """
    home = _open_home(directory)
    stored_runs = {name: describe_run(home.run(name)) for name in _run_ids(home)}
    unknown_runs = [name for name in run_id or () if name not in stored_runs]
    if unknown_runs:
        raise StoreError(
            f"nothing was removed: {home} has no snapshots of run {', '.join(unknown_runs)}. "
            f"Choose --run from: {', '.join(stored_runs) or 'none'}"
        )
    selected = [stored_runs[name] for name in (stored_runs if all_runs else run_id or ())]
    training_runs = [each.run for each in selected if each.training]
    if training_runs and not force:
        raise StoreError(
            f"nothing was removed: run {', '.join(training_runs)} is training on this node and "
            "would lose its snapshots. Stop the training first, or pass --force"
        )
    for each in selected:
        clear_run(home, home.run(each.run), force=force)
    if as_json:
        cleared = [each.run for each in selected]
        print_json({"runs": list(stored_runs.values()), "cleared": cleared})
        return
    shown_runs = selected or list(stored_runs.values())
    show_stored_runs(str(home), shown_runs, bool(selected), stdout_console())


@agent.command()
def stop(
    directory: Directory = Path(DEFAULT_DIRECTORY),
    force: Annotated[
        bool, typer.Option("--force", help="Stop it even if training runs on this node.")
    ] = False,
) -> None:
    """Stop the agent of this node.

    The agent first finishes its current writes, within 20 seconds. The snapshots are kept, and the
    next agent continues with them. Refuses to stop the agent while training runs on this node,
    unless --force is given: training would start another agent within seconds.
    """
    home = _open_home(directory)
    info = running_agent(home)
    if info is None and not home.has_agent():
        raise StoreError(f"nothing to stop: no agent is running in {home}")
    if info is None:
        raise StoreError(f"the agent of {home} is starting or stopping: try again in a few seconds")
    if is_training(home) and not force:
        raise StoreError(
            "the agent was not stopped: training runs on this node, and would start another agent "
            f"in place of process {info.process}. Stop the training first, or pass --force"
        )
    end_agent(home, info)
    stdout_console().print(f"stopped the agent of node {fmt.printable(info.node)}")


def _open_home(directory: Path) -> Home:
    """Return this user's snapshots in a directory, without creating anything.

    Raises:
        StoreError: the directory has no snapshots of this user.
    """
    if not (directory / f"shardwise-{os.getuid()}").exists():
        raise StoreError(
            f"--dir {directory}: the directory has no snapshots of this user. Pass the directory "
            "that the training uses"
        )
    return Home(directory)


def _run_ids(home: Home) -> list[str]:
    """Return the ids of the runs that have snapshots on this node."""
    run_ids = []
    for name in home.runs():
        with suppress(StoreError):  # the directory is not a run
            run_ids.append(home.run(name).name)
    return run_ids


def _tls_from_options(certificate: Path | None, key: Path | None, ca: Path | None) -> Tls | None:
    if certificate is None and key is None and ca is None:
        return None
    if certificate is None or key is None or ca is None:
        raise typer.BadParameter("give all three of --tls-cert, --tls-key and --tls-ca, or none")
    return Tls(certificate=certificate, key=key, ca=ca)
