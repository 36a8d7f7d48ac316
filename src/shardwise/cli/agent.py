"""`shardwise agent`: be the agent of a node, or look at what one guards."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.agent_status import show_status
from shardwise.cli.terminal import output, print_json
from shardwise.memory.node.home import Home
from shardwise.memory.node.interface import LOOPBACK
from shardwise.memory.node.logfile import log_to
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


def _tls(certificate: Path | None, key: Path | None, ca: Path | None) -> Tls | None:
    if certificate is None and key is None and ca is None:
        return None
    if certificate is None or key is None or ca is None:
        raise typer.BadParameter("--tls-cert, --tls-key and --tls-ca go together")
    return Tls(certificate=certificate, key=key, ca=ca)
