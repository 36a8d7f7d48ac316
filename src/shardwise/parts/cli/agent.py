"""`shardwise agent`: run, show, clear or stop the agent of this node."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

import shardwise as sw
from shardwise.parts.cli import formatting as fmt
from shardwise.parts.cli.agent_tables import show_runs, show_status
from shardwise.parts.cli.agent_watch import watch
from shardwise.parts.cli.terminal import AsJson, print_json, stdout_console

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


@agent.command()
def run(
    directory: Directory = Path("/dev/shm"),
    interface: Annotated[
        str,
        typer.Option(metavar="ADDR", help="Address or interface that other nodes connect to."),
    ] = "127.0.0.1",
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
    node = sw.NodeAgent(directory, tls=_tls_from_options(tls_cert, tls_key, tls_ca))
    has_finished = node.run(
        interface=interface,
        port=port,
        domain=domain,
        secret_file=secret_file,
        until_idle=until_idle,
        log=log,
    )
    if not has_finished:
        logging.shutdown()
        os._exit(0)  # an ordinary exit would wait for threads that are still working


@agent.command()
def status(
    directory: Directory = Path("/dev/shm"),
    as_json: AsJson = False,
    tls_cert: Certificate = None,
    tls_key: Key = None,
    tls_ca: Authority = None,
    watches: Annotated[
        bool, typer.Option("--watch", help="Show what the ranks do now, until Ctrl-C.")
    ] = False,
) -> None:
    """Show the agent of this node and its snapshots.

    For each run and step, shows how long it took to commit the snapshot, to protect it on other
    nodes and to persist it to storage. For each of these stages, also shows how many steps it is
    behind the newest snapshot.

    With --watch, instead shows for the running save or restore how many ranks are in which stage,
    and for which ranks the others wait; also on the other nodes.
    """
    node = sw.NodeAgent(directory, tls=_tls_from_options(tls_cert, tls_key, tls_ca))
    if watches:
        watch(node.watch().read, stdout_console())
        return
    found = node.status()
    if as_json:
        print_json(found)
    else:
        show_status(found, stdout_console())


@agent.command()
def clear(
    directory: Directory = Path("/dev/shm"),
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
    node = sw.NodeAgent(directory)
    runs = node.runs()
    cleared = [each.run for each in runs] if all_runs else list(run_id or ())
    node.clear(cleared, force=force)
    if as_json:
        print_json({"runs": runs, "cleared": cleared})
        return
    shown = [each for each in runs if each.run in cleared] or runs
    show_runs(str(directory), shown, bool(cleared), stdout_console())


@agent.command()
def stop(
    directory: Directory = Path("/dev/shm"),
    force: Annotated[
        bool, typer.Option("--force", help="Stop it even if training runs on this node.")
    ] = False,
) -> None:
    """Stop the agent of this node.

    The agent first finishes its current writes, within 20 seconds. The snapshots are kept, and the
    next agent continues with them. Refuses to stop the agent while training runs on this node,
    unless --force is given: training would start another agent within seconds.
    """
    node = sw.NodeAgent(directory).stop(force=force)
    stdout_console().print(f"stopped the agent of node {fmt.printable(node)}")


def _tls_from_options(certificate: Path | None, key: Path | None, ca: Path | None) -> sw.Tls | None:
    if certificate is None and key is None and ca is None:
        return None
    if certificate is None or key is None or ca is None:
        raise typer.BadParameter("give all three of --tls-cert, --tls-key and --tls-ca, or none")
    return sw.Tls(certificate=certificate, key=key, ca=ca)
