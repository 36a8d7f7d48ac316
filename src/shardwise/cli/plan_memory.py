"""`shardwise plan-memory`: compute how much memory the snapshots of a run need on each node."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.table import Table

from shardwise.cli import formatting as fmt
from shardwise.cli.terminal import AsJson, print_json, stdout_console
from shardwise.manifest.checksums import block_count
from shardwise.memory.free_files import bytes_needed_for_others
from shardwise.memory.options import Memory
from shardwise.memory.trainer.slots import slot_size

BYTES_WITH_ADAMW = 12.0
"""Bytes for each parameter: a float32 weight, and two float32 moments."""

MARGIN = 1.1
GIBIBYTE = 1 << 30


def _option(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=text)


Parameters = Annotated[
    float | None, _option("X", "Number of parameters of the model, such as 8e9.")
]
BytesPerParameter = Annotated[
    float, _option("X", "Saved bytes for each parameter. 12: float32 weights, and AdamW.")
]
StateBytes = Annotated[
    float | None, _option("X", "Bytes of a checkpoint, instead of --parameters.")
]
Nodes = Annotated[int, _option("N", "Number of nodes that train.")]
RanksPerNode = Annotated[int, _option("N", "Number of ranks on each node.")]
Slots = Annotated[int, _option("N", "sw.Memory(slots=N). Without memory=, pass 1.")]
Copies = Annotated[int, _option("N", "sw.Memory(copies=N): copies on other nodes.")]
Parity = Annotated[int, _option("N", "sw.Memory(parity=N): nodes of a group that may be lost.")]
Group = Annotated[int, _option("N", "sw.Memory(group=N): nodes that protect each other.")]


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """The memory that a node needs for snapshots, in bytes.

    Attributes:
        state: the state of all ranks.
        saved_by_rank: the part of the state that each rank saves.
        saved_by_node: the part of the state that each node saves.
        slots: the slots of the node's ranks.
        for_others: the copies or parity that the node stores for other nodes.
        total: `slots` and `for_others` together.
    """

    state: int
    saved_by_rank: int
    saved_by_node: int
    slots: int
    for_others: int
    total: int


def estimate_memory(state: int, memory: Memory, *, nodes: int, ranks_per_node: int) -> NodeMemory:
    """Return the memory that a node needs, if all ranks save equal parts of the state.

    Args:
        state: the bytes of the state of all ranks. Replicas count once.

    Raises:
        ValueError: a number is out of range.
    """
    if state < 1 or nodes < 1 or ranks_per_node < 1:
        raise ValueError(
            f"{state} bytes on {nodes} nodes of {ranks_per_node} ranks: all must be at least 1"
        )
    saved_by_rank = -(-state // (nodes * ranks_per_node))
    file_size = saved_by_rank + 4 * block_count(saved_by_rank)
    slots = (memory.slots + 1) * slot_size(file_size) * ranks_per_node
    for_others = bytes_needed_for_others(file_size, memory, nodes=nodes) * ranks_per_node
    saved_by_node = saved_by_rank * ranks_per_node
    return NodeMemory(state, saved_by_rank, saved_by_node, slots, for_others, slots + for_others)


def plan_memory(
    parameters: Parameters = None,
    bytes_per_parameter: BytesPerParameter = BYTES_WITH_ADAMW,
    state_bytes: StateBytes = None,
    nodes: Nodes = 1,
    ranks_per_node: RanksPerNode = 8,
    slots: Slots = 2,
    copies: Copies = 0,
    parity: Parity = 0,
    group: Group = 8,
    as_json: AsJson = False,
) -> None:
    """Compute the size of /dev/shm that a run needs.

    Snapshots in memory need a multiple of the state. This command computes the memory of each
    node, and what to pass to Docker and Kubernetes.

    \b
    Example:
      shardwise plan-memory --parameters 8.03e9 --nodes 4 --ranks-per-node 8 \\
          --slots 2 --parity 1
    """
    try:
        memory = Memory(slots=slots, copies=copies, parity=parity, group=group)
        state = _state_bytes(parameters, bytes_per_parameter, state_bytes)
        needed = estimate_memory(state, memory, nodes=nodes, ranks_per_node=ranks_per_node)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        print_json({**asdict(needed), "shm_size": _with_margin(needed.total) * GIBIBYTE})
        return
    slot_count = fmt.count(memory.slots + 1, "slot")
    protection = f"for {fmt.count(memory.slots, 'snapshot')}"
    rows = (
        ("the state", needed.state, ""),
        ("each rank saves", needed.saved_by_rank, ""),
        ("each node saves", needed.saved_by_node, ""),
        ("slots of a node", needed.slots, f"{slot_count} for each of {ranks_per_node} ranks"),
        ("stored for other nodes", needed.for_others, protection if needed.for_others else ""),
        ("each node needs", needed.total, ""),
    )
    grid = Table.grid(padding=(0, 3, 0, 0))
    grid.add_column()
    grid.add_column(justify="right")
    for label, nbytes, note in rows:
        grid.add_row(label, fmt.format_bytes(nbytes), note)
    console = stdout_console()
    console.print(grid)
    console.print("\nWith a tenth to spare:")
    size = _with_margin(needed.total)
    console.print(f"  Docker       --shm-size={size}g")
    console.print(f"  Kubernetes   emptyDir: {{medium: Memory, sizeLimit: {size}Gi}}")
    console.print(f"  a node       mount -o remount,size={size}g /dev/shm")


def _state_bytes(
    parameters: float | None, bytes_per_parameter: float, state_bytes: float | None
) -> int:
    if (parameters is None) == (state_bytes is None):
        given = "neither" if parameters is None else "both"
        raise ValueError(f"pass exactly one of --parameters and --state-bytes ({given} given)")
    nbytes = state_bytes if parameters is None else parameters * bytes_per_parameter
    if nbytes is None or not math.isfinite(nbytes):
        raise ValueError(f"a state of {nbytes} bytes: pass a number")
    return math.ceil(nbytes)


def _with_margin(nbytes: int) -> int:
    """Return the GiB to reserve: the bytes that are needed, and a tenth more."""
    return math.ceil(nbytes * MARGIN / GIBIBYTE)
