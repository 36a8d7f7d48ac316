"""`shardwise agent`: run, show, clear or stop the agent of this node."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli import formatting as fmt
from shardwise.cli.agent_status import show_kept, show_status
from shardwise.cli.terminal import AsJson, output, print_json
from shardwise.errors import StoreError
from shardwise.memory.agent.status import kept_run
from shardwise.memory.agent.supervise import is_training
from shardwise.memory.home import Home
from shardwise.memory.interface import LOOPBACK
from shardwise.memory.options import DIRECTORY
from shardwise.memory.reclaim import clear_run
from shardwise.memory.spawn import end_agent, log_to, running_agent
from shardwise.memory.tls import Tls

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
    directory: Directory = Path(DIRECTORY),
    interface: Annotated[
        str,
        typer.Option(metavar="ADDR", help="Address or interface that other nodes connect to."),
    ] = LOOPBACK,
    port: Annotated[
        int, typer.Option(metavar="N", help="The port. 0: the previous port, or a free one.")
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
        typer.Option(metavar="FILE", help="The secret of all nodes. Default: generated in --dir."),
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
    or in a separate container, if the agent would otherwise be killed together with the training.
    On SIGTERM the agent finishes its current writes, within 20 seconds.
    """
    from shardwise.memory.agent.service import ServeOptions, run_agent

    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
        handlers=[logging.StreamHandler() if log is None else log_to(log)],
        force=True,
    )
    options = ServeOptions(
        interface=interface,
        port=port,
        domain=domain,
        tls=_tls(tls_cert, tls_key, tls_ca),
        secret=secret_file,
        until_idle=until_idle,
    )
    if not run_agent(directory, options):
        logging.shutdown()
        os._exit(0)  # an ordinary exit would wait for threads that are still working


@agent.command()
def status(
    directory: Directory = Path(DIRECTORY),
    tensors: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="Show how matching tensors are protected: 'model.*'."),
    ] = None,
    as_json: AsJson = False,
    tls_cert: Certificate = None,
    tls_key: Key = None,
    tls_ca: Authority = None,
) -> None:
    """Show the agent of this node and its snapshots.

    For each run and step: when the snapshot was committed, protected by other nodes and persisted
    to storage, and how far each stage is behind the newest step.
    """
    from shardwise.memory.agent.status import status_of

    found = status_of(Home(directory), _tls(tls_cert, tls_key, tls_ca), tensors)
    if as_json:
        print_json(found)
    else:
        show_status(found, output())


@agent.command()
def clear(
    directory: Directory = Path(DIRECTORY),
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

    Without --run or --all, lists the runs and removes nothing. Checkpoints in storage are kept. If
    any of the runs is training on this node, nothing is removed unless --force is given. Other
    nodes keep their snapshots: run this command on each of them.
    """
    home = _home(directory)
    kept = {name: kept_run(home.run(name)) for name in _runs(home)}
    unknown = [name for name in run_id or () if name not in kept]
    if unknown:
        there = ", ".join(kept) or "none"
        raise StoreError(f"{home} has no snapshots of run {', '.join(unknown)}; its runs: {there}")
    chosen = list(kept.values()) if all_runs else [kept[name] for name in run_id or ()]
    busy = [each.run for each in chosen if each.training]
    if busy and not force:
        raise StoreError(
            f"nothing was removed: run {', '.join(busy)} is training on this node and would lose "
            "its snapshots. Stop the training first, or pass --force"
        )
    for each in chosen:
        clear_run(home, home.run(each.run), force=force)
    if as_json:
        print_json({"runs": list(kept.values()), "cleared": [each.run for each in chosen]})
        return
    show_kept(str(home), chosen or list(kept.values()), bool(chosen), output())


@agent.command()
def stop(
    directory: Directory = Path(DIRECTORY),
    force: Annotated[
        bool, typer.Option("--force", help="Stop it even if training runs on this node.")
    ] = False,
) -> None:
    """Stop the agent of this node.

    The snapshots are kept, and the next agent takes them over. The agent first finishes its current
    writes, within 20 seconds. Refused if training runs on this node, unless --force is given:
    training would start another agent within seconds.
    """
    home = _home(directory)
    info = running_agent(home)
    if info is None and not home.has_agent():
        raise StoreError(f"no agent is running in {home}")
    if info is None:
        raise StoreError(f"the agent of {home} is starting or stopping: try again in a few seconds")
    if is_training(home) and not force:
        raise StoreError(
            "the agent was not stopped: training runs on this node, and would start another agent "
            f"in place of process {info.process}. Stop the training first, or pass --force"
        )
    end_agent(home, info)
    output().print(f"stopped the agent of node {fmt.printable(info.node)}")


def _home(directory: Path) -> Home:
    """Return the home in a directory, without creating it.

    Raises:
        StoreError: there is none.
    """
    if not (directory / f"shardwise-{os.getuid()}").exists():
        raise StoreError(f"{directory} has no snapshots of this user: check --dir")
    return Home(directory)


def _runs(home: Home) -> list[str]:
    """Return the ids of the runs of a node. Directories that are not runs are skipped."""
    found = []
    for name in home.runs():
        with suppress(StoreError):
            found.append(home.run(name).name)
    return found


def _tls(certificate: Path | None, key: Path | None, ca: Path | None) -> Tls | None:
    if certificate is None and key is None and ca is None:
        return None
    if certificate is None or key is None or ca is None:
        raise typer.BadParameter("give all three of --tls-cert, --tls-key and --tls-ca, or none")
    return Tls(certificate=certificate, key=key, ca=ca)
