"""`shardwise agent`: be the agent of a node, or look at what one guards."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli import wording
from shardwise.cli.agent_status import show_kept, show_status
from shardwise.cli.terminal import AsJson, output, print_json
from shardwise.errors import StoreError
from shardwise.memory.agent.keeper import is_attended
from shardwise.memory.home import Home
from shardwise.memory.interface import LOOPBACK
from shardwise.memory.node.clearing import clear_run, kept_run
from shardwise.memory.options import DIRECTORY
from shardwise.memory.spawn import end_agent, log_to, running_agent
from shardwise.memory.tls import Tls

agent = typer.Typer(no_args_is_help=True, help="Run, show or stop the agent of this node.")
Directory = Annotated[
    Path, typer.Option("--dir", metavar="PATH", help="Where the node keeps its snapshots.")
]
Certificate = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The certificate of this node, in PEM.")
]
Key = Annotated[Path | None, typer.Option(metavar="FILE", help="The key of the certificate.")]
Authority = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The authority that signs all certificates.")
]


@agent.command()
def run(
    directory: Directory = Path(DIRECTORY),
    interface: Annotated[
        str,
        typer.Option(metavar="ADDR", help="Address or network interface to serve other nodes on."),
    ] = LOOPBACK,
    port: Annotated[
        int, typer.Option(metavar="N", help="The port. 0: the port used before, or a free one.")
    ] = 0,
    domain: Annotated[
        str,
        typer.Option(metavar="NAME", help="What fails together with this node, such as its rack."),
    ] = "",
    tls_cert: Certificate = None,
    tls_key: Key = None,
    tls_ca: Authority = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The secret of all nodes. Default: made in --dir."),
    ] = None,
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="End when no snapshots and no training are left.")
    ] = False,
    log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Log to this file, at most 2 MB, not to stderr."),
    ] = None,
) -> None:
    """Run the agent of this node.

    Training starts an agent by itself if none runs. Start one with this command, beside torchrun
    or in a container of its own, if the end of the training would also end the agent. On SIGTERM
    it finishes what it is writing, within 20 seconds.
    """
    from shardwise.memory.agent.service import Terms, run_agent

    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
        handlers=[logging.StreamHandler() if log is None else log_to(log)],
        force=True,
    )
    terms = Terms(
        interface=interface,
        port=port,
        domain=domain,
        tls=_tls(tls_cert, tls_key, tls_ca),
        secret=secret_file,
        until_idle=until_idle,
    )
    if not run_agent(directory, terms):
        logging.shutdown()
        os._exit(0)  # threads still work: an ordinary exit would wait for them


@agent.command()
def status(
    directory: Directory = Path(DIRECTORY),
    tensors: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="Show how tensors are protected: 'model.*'."),
    ] = None,
    as_json: AsJson = False,
    tls_cert: Certificate = None,
    tls_key: Key = None,
    tls_ca: Authority = None,
) -> None:
    """Show the agent of this node and its snapshots.

    For each run and step: when it was committed, protected by other nodes, and persisted to
    storage, and how far the newest step is ahead.
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
        typer.Option("--run", metavar="ID", help="Clear this run. May be given several times."),
    ] = None,
    all_runs: Annotated[bool, typer.Option("--all", help="Clear all runs of this node.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Clear runs whose training still runs on this node.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove the snapshots of runs from the memory of this node.

    Without --run or --all, list the runs and remove nothing. Checkpoints in storage stay. A run
    whose training still runs on this node is refused, unless --force is given; then nothing is
    removed of the others either. Other nodes keep what they have: run this on each.
    """
    home = _home(directory)
    kept = {name: kept_run(home.run(name)) for name in _runs(home)}
    unknown = [name for name in run_id or () if name not in kept]
    if unknown:
        there = ", ".join(kept) or "none"
        raise StoreError(f"{home} keeps nothing of run {', '.join(unknown)}; its runs: {there}")
    chosen = list(kept.values()) if all_runs else [kept[name] for name in run_id or ()]
    busy = [each.run for each in chosen if each.training]
    if busy and not force:
        raise StoreError(
            f"a trainer of run {', '.join(busy)} runs on this node and would lose its snapshots: "
            "nothing was removed. End the training first, or pass --force"
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
        bool, typer.Option("--force", help="Stop it although training runs on this node.")
    ] = False,
) -> None:
    """Stop the agent of this node.

    The snapshots stay, and the next agent takes them over. The agent first finishes what it is
    writing, within 20 seconds. Where training runs on this node, this is refused, unless --force
    is given: training starts another agent within seconds.
    """
    home = _home(directory)
    info = running_agent(home)
    if info is None and not home.has_agent():
        raise StoreError(f"no agent runs in {home}")
    if info is None:
        raise StoreError(f"the agent of {home} is starting or ending just now: try again")
    if is_attended(home) and not force:
        raise StoreError(
            f"training runs on this node, and would start another agent in place of process "
            f"{info.process}: end the training first, or pass --force"
        )
    end_agent(home, info)
    output().print(f"stopped the agent of node {wording.printable(info.node)}")


def _home(directory: Path) -> Home:
    """The home in a directory, which is not made here.

    Raises:
        StoreError: there is none.
    """
    if not (directory / f"shardwise-{os.getuid()}").exists():
        raise StoreError(f"{directory} has no snapshots of this user: is --dir right?")
    return Home(directory)


def _runs(home: Home) -> list[str]:
    """The ids of the runs of a node; what is not a run is left out."""
    found = []
    for name in home.runs():
        with suppress(StoreError):
            found.append(home.run(name).name)
    return found


def _tls(certificate: Path | None, key: Path | None, ca: Path | None) -> Tls | None:
    if certificate is None and key is None and ca is None:
        return None
    if certificate is None or key is None or ca is None:
        raise typer.BadParameter("--tls-cert, --tls-key and --tls-ca go together")
    return Tls(certificate=certificate, key=key, ca=ca)
