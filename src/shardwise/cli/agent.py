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
from shardwise.memory.node.clearing import clear_run, kept_run
from shardwise.memory.node.home import Home
from shardwise.memory.node.interface import LOOPBACK
from shardwise.memory.node.logfile import log_to
from shardwise.memory.node.spawn import card_of, end_agent
from shardwise.memory.options import DIRECTORY
from shardwise.memory.tls import Tls

agent = typer.Typer(
    no_args_is_help=True, help="The agent of a node, which guards its snapshots in memory."
)
Directory = Annotated[
    Path, typer.Option("--dir", help="Where the node keeps its snapshots.", show_default=True)
]
Certificate = Annotated[Path | None, typer.Option(help="Certificate of this node, in PEM.")]
Key = Annotated[Path | None, typer.Option(help="The key of the certificate.")]
Authority = Annotated[Path | None, typer.Option(help="Who signs the certificates of nodes.")]


@agent.command()
def run(
    directory: Directory = Path(DIRECTORY),
    interface: Annotated[
        str, typer.Option(help="Where to serve other nodes: an address, or such as eth0.")
    ] = LOOPBACK,
    port: Annotated[
        int, typer.Option(help="The port; 0: that of the agent before, or any that is free.")
    ] = 0,
    domain: Annotated[str, typer.Option(help="What fails together with this node.")] = "",
    tls_cert: Certificate = None,
    tls_key: Key = None,
    tls_ca: Authority = None,
    secret_file: Annotated[
        Path | None, typer.Option(help="What others must know; made in the home if not given.")
    ] = None,
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="End when nothing is kept, and nobody trains.")
    ] = False,
    log: Annotated[
        Path | None, typer.Option(help="Log to this file, 2 MB at most, and not to stderr.")
    ] = None,
) -> None:
    """Be the agent of this node, until SIGTERM.

    Training starts one by itself where none lives. Start it beside torchrun, or in a container of
    its own, where whatever ends the training would end it too. On SIGTERM it finishes what it is
    writing, within 20 seconds.
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
        typer.Option(help="Show how these tensors are protected: a pattern, such as 'model.*'."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    tls_cert: Certificate = None,
    tls_key: Key = None,
    tls_ca: Authority = None,
) -> None:
    """Show a node: its agent, its memory, and its snapshots, and how far each has come.

    With --json: {"node", "url", "domain", "process", "alive", "answers", "agent_bytes", "training",
    "directory", "bytes", "bytes_left", "runs": [{"run", "slots_used", "slots_free", "bytes_free",
    "behind": {STAGE: {"step", "steps", "seconds"}}, "snapshots": [{"step", "bytes",
    "bytes_for_others", "age", STAGE: {"state", "seconds", "failure"}, "protected_by"}],
    "tensors": {"step", "tensors": [{"name", "bytes", "nodes", "survives", "guards": [{"kind",
    "survives", "nodes"}]}]}}]}; the stages are "commit", "protect" and "persist", a state is "",
    "under way", "done" or "failed", and "tensors" is null without --tensors.
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
    """Stop the agent of this node. The snapshots stay, and the next agent takes them over.

    The agent first finishes what it is writing, within 20 seconds. Where training runs on this
    node, this is refused, unless --force is given: training starts another agent within seconds.
    """
    home = _home(directory)
    card = card_of(home)
    if card is None and not home.has_agent():
        raise StoreError(f"no agent runs in {home}")
    if card is None:
        raise StoreError(f"the agent of {home} is starting or ending just now: try again")
    if is_attended(home) and not force:
        raise StoreError(
            f"training runs on this node, and would start another agent in place of process "
            f"{card.process}: end the training first, or pass --force"
        )
    end_agent(home, card)
    output().print(f"stopped the agent of node {wording.printable(card.node)}")


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
