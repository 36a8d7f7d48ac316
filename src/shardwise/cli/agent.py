"""`shardwise agent`: be the agent of a node, or look at what one guards."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from shardwise.cli import wording
from shardwise.cli.terminal import output, print_json
from shardwise.memory import notes
from shardwise.memory.home import Home, Run, read_note
from shardwise.memory.interface import LOOPBACK
from shardwise.memory.notes import Card
from shardwise.memory.options import DIRECTORY
from shardwise.memory.place import Place
from shardwise.memory.tls import Tls

STAGES = ("commit", "protect", "persist")

agent = typer.Typer(
    no_args_is_help=True, help="The agent of a node, which guards its snapshots in memory."
)
Directory = Annotated[
    Path, typer.Option("--dir", help="Where the node keeps its snapshots.", show_default=True)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A snapshot on this node, and how far each stage has come ("" if it was not asked for)."""

    run: str
    step: int
    bytes: int
    commit: str
    protect: str
    persist: str


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
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate of this node, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    tls_ca: Annotated[Path | None, typer.Option(help="Who signs those of the others.")] = None,
    secret_file: Annotated[
        Path | None, typer.Option(help="What others must know; made in the home if not given.")
    ] = None,
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="End when nothing is kept, and nobody trains.")
    ] = False,
) -> None:
    """Be the agent of this node, until SIGTERM.

    Training starts one by itself where none lives. Start it beside torchrun, or in a container of
    its own, where whatever ends the training would end it too. On SIGTERM it finishes what it is
    writing, within 20 seconds.
    """
    from shardwise.memory.service import Terms, run_agent

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True
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


def _tls(certificate: Path | None, key: Path | None, ca: Path | None) -> Tls | None:
    if certificate is None and key is None and ca is None:
        return None
    if certificate is None or key is None or ca is None:
        raise typer.BadParameter("--tls-cert, --tls-key and --tls-ca go together")
    return Tls(certificate=certificate, key=key, ca=ca)


@agent.command()
def status(
    directory: Directory = Path(DIRECTORY),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the snapshots that a node keeps, and how far each has come.

    With --json: {"node", "url", "alive", "bytes", "snapshots": [{"run", "step", "bytes", "commit",
    "protect", "persist"}]}; a stage is "", "under way", "done", or what it failed with.
    """
    home = Home(directory)
    card = read_note(home.card, Card)
    kept = [_kept(home.run(name), step) for name in home.runs() for step in home.run(name).steps()]
    used = sum(path.stat().st_size for path in home.path.rglob("*") if path.is_file())
    document = {
        "node": card.node if card else None,
        "url": card.url if card else None,
        "alive": home.has_agent(),
        "bytes": used,
        "snapshots": kept,
    }
    if as_json:
        print_json(document)
    else:
        _show(home, card, used, kept, output())


def _kept(kept: Run, step: int) -> Kept:
    place = Place(kept, step)
    files = [path for path in place.path.glob("*") if path.suffix in (".safetensors", ".bin")]
    return Kept(
        run=kept.name,
        step=step,
        bytes=sum(path.stat().st_size for path in files),
        **{stage: _stage(place, stage) for stage in STAGES},
    )


def _stage(place: Place, stage: str) -> str:
    names = place.named(".json")
    for name in names:
        if name.startswith(f"{stage}-all-"):
            done = place.ended(stage, name.removesuffix(".json").rsplit("-", 1)[-1])
            return (done.failure or "done") if done else ""
    wanted = stage == "commit" or bool(notes.requested(stage, names))
    wanted |= stage == "persist" and any(draft.root is not None for draft in place.drafts())
    return "under way" if wanted else ""


def _show(home: Home, card: Card | None, used: int, kept: list[Kept], console: Console) -> None:
    alive = "alive" if home.has_agent() else "no agent lives here"
    who = f"node {card.node} at {card.url}" if card else str(home)
    console.print(f"{who}: {alive}, {wording.size(used)} in {home}", highlight=False)
    if not kept:
        return
    table = Table("run", "step", "size", *STAGES, box=None, pad_edge=False)
    for each in kept:
        stages = (each.commit, each.protect, each.persist)
        table.add_row(each.run, str(each.step), wording.size(each.bytes), *stages)
    console.print(table)
