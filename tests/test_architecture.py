"""The layers and rules of CONTRIBUTING.md that can be checked automatically."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import shardwise

# Imports go down, from a row to the rows below it, never between components of one row.
LAYERS = (
    ("__main__",),
    ("parts.cli", "integrations"),
    ("shardwise",),  # the package's __init__, which exports the public names
    ("checkpointer", "data", "parts.convert", "parts.reporting"),
    ("parts.listing", "parts.resizing", "parts.telemetry"),
    ("parts.frameworks", "parts.sharing"),
    ("parts.formats.readers",),
    ("parts.formats", "parts.memory"),
    ("parts.tiers",),
    (
        *("parts.checks", "parts.lineage", "parts.ranks", "parts.retention", "parts.stores"),
        *("parts.tensor_classes", "parts.words"),
    ),
    ("parts.quantized",),
    ("kernel.api",),
    ("kernel.loading",),
    ("kernel.checkpoint", "kernel.opening"),
    ("kernel.saved_tensor",),
    ("ports", "ports.module_binding"),
    ("kernel.adapters", "kernel.engine"),
    ("ports.binding",),
    ("kernel.plan", "kernel.state"),
    ("kernel.manifest", "ports.tensor_classes"),
    ("kernel.boxes", "kernel.store"),
    ("kernel.plugins", "ports.checks"),
    ("kernel.deadline", "kernel.decoding", "kernel.errors", "kernel.events", "kernel.version"),
    ("kernel", "parts", "ports.built_in"),
)
# The same within large packages.
LAYERS_OF_MEMORY = (
    ("trainer",),
    ("agent",),
    ("remote",),
    ("reclaim",),
    ("decide", "progress", "registry", "spawn"),
    ("observe", "pool"),
    ("view",),
    ("identity", "node_tree", "rank_liveness", "replies", "seal", "states"),
    ("home", "redundancy"),
    ("records",),
    ("files", "options", "times"),
)
LAYERS_OF_FORMATS = (
    ("opening", "steps"),
    ("reader", "specification"),
    ("families", "remap", "specs"),
    ("foreign_builder",),
    ("language", "merge_ranks"),
    ("values",),
    ("nested", "stored_composites", "torchao_names"),
    ("masters", "optimizers"),
    ("file_tree",),
    ("containers",),
    ("foreign",),
)
LAYERS_OF_CHECKPOINTER = (
    ("checkpointer",),
    ("saving",),
    ("start_from",),
    ("mirroring", "restoring"),
    ("memory_saver",),
    ("hooks", "saver"),
    ("prepared_state", "replica_checks"),
    ("settings",),
    ("handle", "signals"),
)
TESTING = "testing"  # may import anything, and nothing imports it
AGENT = "parts.memory.agent.process"  # runs in a separate process, which must stay small
WITHOUT_TORCH = ("kernel.boxes", "kernel.manifest", "kernel.plan")
SUITES = "_suite"  # modules with tests for users, which may use assert
MAY_PRINT = ("__main__", "parts.cli")
FORBIDDEN_NAMES = {"base", "common", "helper", "helpers", "misc", "util", "utils"}
MOST_LINES_OF_FILE = 500
MOST_LINES_OF_FUNCTION = 60
PUBLIC = [
    "Best",
    "Box",
    "Checkpoint",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "Checkpointer",
    "Comparison",
    "ConversionReport",
    "CorruptionError",
    "Damage",
    "Divergence",
    "Event",
    "FormatError",
    "Keep",
    "LayoutError",
    "ListedCheckpoint",
    "Listing",
    "LoadReport",
    "LostRankError",
    "Memory",
    "Mirror",
    "MismatchError",
    "NodeAgent",
    "NodeStatus",
    "PerRank",
    "RankError",
    "Report",
    "RestoreReport",
    "RngState",
    "Run",
    "RunHook",
    "RunProgress",
    "RunStatus",
    "SaveHandle",
    "SaveReport",
    "SavedTensor",
    "Shards",
    "ShardwiseError",
    "SnapshotStatus",
    "SoloGroup",
    "SpecError",
    "StateError",
    "StoreError",
    "Tls",
    "TreeGroup",
    "VerifyReport",
    "export",
    "list_checkpoints",
    "load",
    "open",
    "remove",
    "report",
    "save",
    "spec",
    "trainable",
]

SOURCE = Path(shardwise.__file__).parent
ROOT = Path(__file__).parents[1]
RANKS = {component: rank for rank, row in enumerate(LAYERS) for component in row}
WITHIN = {
    folder: {part: rank for rank, row in enumerate(layers) for part in row}
    for folder, layers in (
        ("parts.memory", LAYERS_OF_MEMORY),
        ("parts.formats", LAYERS_OF_FORMATS),
        ("checkpointer", LAYERS_OF_CHECKPOINTER),
    )
}


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the package: its path below the package, and its source."""

    path: Path
    text: str

    @property
    def name(self) -> str:
        """As it is imported, below the package: `plan.save`, and "" for the package itself."""
        return ".".join(part for part in self.path.with_suffix("").parts if part != "__init__")

    @property
    def component(self) -> str:
        return component_of(self.name)

    def nodes(self) -> Iterator[ast.AST]:
        return ast.walk(ast.parse(self.text))

    def at(self, node: ast.AST) -> str:
        return f"{self.path.as_posix()}:{getattr(node, 'lineno', 1)}"

    def imports(self) -> Iterator[tuple[ast.AST, str]]:
        """Full name of each import: at the top, within a function, and for types only."""
        for node in self.nodes():
            if isinstance(node, ast.Import):
                yield from ((node, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                origin = self.origin(node)
                yield from ((node, f"{origin}.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
                names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
                yield from ((node, str(name)) for name in names)

    def origin(self, node: ast.ImportFrom) -> str:
        """What is imported from, with leading dots resolved."""
        above = ["shardwise", *self.path.parts[:-1]]
        above = above[: len(above) - node.level + 1] if node.level else []
        return ".".join([*above, *([node.module] if node.module else [])])

    def components(self) -> Iterator[tuple[ast.AST, str]]:
        """The components of the package that are imported; a public name is of `shardwise`."""
        for node, name in self.imports():
            first, _, rest = name.partition(".")
            if first == "shardwise":
                found = component_of(rest)
                yield node, found if found in RANKS or found == TESTING else "shardwise"


MODULES = [
    Module(path.relative_to(SOURCE), path.read_text(encoding="utf-8"))
    for path in sorted(SOURCE.rglob("*.py"))
]
PACKAGES = [
    Module(path.relative_to(ROOT), path.read_text(encoding="utf-8"))
    for path in sorted(ROOT.glob("packages/*/src/**/*.py"))
]
"""The modules of the other distributions in this repository."""


def component_of(name: str) -> str:
    """The row of LAYERS to which a module or name below the package belongs."""
    nested = [each for each in RANKS if f"{name}.".startswith(f"{each}.")]
    return max(nested, key=len) if nested else name.split(".")[0] or "shardwise"


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def wrong_imports(module: Module) -> list[str]:
    own = module.component
    return [
        f"{module.at(node)}: {own} imports {component}"
        for node, component in module.components()
        if component != own and own != TESTING and RANKS.get(component, -1) <= RANKS[own]
    ]


def wrong_imports_within(module: Module) -> list[str]:
    folder = next(each for each in WITHIN if f"{module.name}.".startswith(f"{each}."))
    ranks, own = WITHIN[folder], part_of(folder, module.name)
    parts = [
        (node, part_of(f"shardwise.{folder}", name))
        for node, name in module.imports()
        if name.startswith(f"shardwise.{folder}.")
    ]
    return [
        f"{module.at(node)}: {own} imports {part}"
        for node, part in parts
        if own and part != own and ranks.get(part, -1) <= ranks[own]
    ]


def part_of(folder: str, name: str) -> str:
    """The module or package directly in a folder to which a name belongs; "" for the folder."""
    return name.removeprefix(folder).removeprefix(".").split(".")[0]


def test_every_component_has_its_layer() -> None:
    assert {module.component for module in MODULES} <= {*RANKS, TESTING}, "add it to LAYERS"


def test_imports_go_one_way() -> None:
    assert not [wrong for module in MODULES for wrong in wrong_imports(module)]


@pytest.mark.parametrize("folder", WITHIN)
def test_imports_within_a_folder_go_one_way(folder: str) -> None:
    modules = [
        module
        for module in MODULES
        if module.name.startswith(f"{folder}.") and module.component == folder
    ]
    assert {part_of(folder, module.name) for module in modules} - {""} == WITHIN[folder].keys()
    assert not [wrong for module in modules for wrong in wrong_imports_within(module)]


@pytest.mark.parametrize(
    ("path", "text", "wrong"),
    [
        ("parts/memory/agent/lead.py", "from shardwise.parts.memory.home import Home", 0),
        (
            "parts/memory/agent/lead.py",
            "from shardwise.parts.memory.remote import snapshot_nodes",
            0,
        ),
        ("parts/memory/agent/lead.py", "from shardwise.parts.memory.trainer.slots import Slots", 1),
        ("parts/memory/agent/lead.py", "def late():\n    from ..trainer import slots", 1),
        ("parts/memory/agent/lead.py", "import shardwise.parts.memory.surprise", 1),
        (
            "parts/formats/containers/pickles.py",
            "from shardwise.parts.formats.foreign import Foreign",
            0,
        ),
        (
            "parts/formats/containers/pickles.py",
            "from shardwise.parts.formats.readers import dcp",
            1,
        ),
    ],
)
def test_a_wrong_import_within_a_folder_is_seen(path: str, text: str, wrong: int) -> None:
    assert len(wrong_imports_within(Module(Path(path), text))) == wrong


@pytest.mark.parametrize(
    ("path", "text", "wrong"),
    [
        ("kernel/plan/save.py", "from shardwise.kernel.manifest.pieces import Pieces", 0),
        ("kernel/plan/save.py", "from shardwise.kernel.plan.load import plan_load", 0),
        ("kernel/plan/save.py", "from shardwise.kernel import errors", 0),
        ("kernel/plan/save.py", "def late():\n    import shardwise.kernel.api", 1),
        (
            "kernel/plan/save.py",
            "if TYPE_CHECKING:\n    from shardwise.kernel.engine.load import x",
            1,
        ),
        ("kernel/plan/save.py", "from ..engine import read", 1),
        ("kernel/plan/save.py", "from .. import engine, errors", 1),
        ("kernel/plan/__init__.py", "from .save import SavePlan", 0),
        ("kernel/plan/save.py", "from shardwise import load", 1),
        ("kernel/plan/save.py", "importlib.import_module('shardwise.parts.cli')", 1),
        ("kernel/boxes/box.py", "from shardwise.kernel.store import Store", 1),
        ("kernel/store/url.py", "from shardwise.kernel.boxes import Box", 1),
        ("kernel/events.py", "from shardwise.kernel.errors import StoreError", 1),
        ("parts/cli/main.py", "import shardwise as sw", 0),
        ("parts/cli/main.py", "from shardwise.testing import reader_suite", 1),
        ("testing/reader_suite.py", "from shardwise.parts.cli import main", 0),
        ("__init__.py", "from shardwise.kernel.api import load", 0),
    ],
)
def test_a_wrong_import_is_seen(path: str, text: str, wrong: int) -> None:
    assert len(wrong_imports(Module(Path(path), text))) == wrong


def test_torch_stays_out_of_the_arithmetic() -> None:
    arithmetic = [module for module in MODULES if module.component in WITHOUT_TORCH]
    names = [(module.at(node), name) for module in arithmetic for node, name in module.imports()]
    assert names
    assert not [where for where, name in names if name.split(".")[0] == "torch"]


@pytest.mark.parametrize("component", [*WITHOUT_TORCH, AGENT])
def test_the_arithmetic_and_the_agent_load_without_torch(component: str) -> None:
    names = [f"shardwise.{module.name}" for module in MODULES if module.component == component]
    names = names or [f"shardwise.{component}"]
    script = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    environ = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run([sys.executable, "-c", script], env=environ, check=False)
    assert done.returncode == 0


def test_types_are_prepared_before_threads_decode_them() -> None:
    """See `shardwise/decoding.py`."""
    unprepared = [
        module.path.as_posix()
        for module in MODULES
        if "(msgspec.Struct" in module.text
        and "prepare_decoding("
        not in module.text.replace("@prepare_decoding\n", "prepare_decoding(")
        and "Decoder(" not in module.text
    ]
    assert not unprepared


def test_files_and_functions_are_short() -> None:
    modules = [*MODULES, *PACKAGES]
    files = [
        module.path.as_posix()
        for module in modules
        if len(module.text.splitlines()) > MOST_LINES_OF_FILE
    ]
    functions = [
        f"{module.at(node)}: {node.name}"
        for module in modules
        for node in module.nodes()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= MOST_LINES_OF_FUNCTION
    ]
    assert not files + functions


def test_modules_have_names_that_say_something() -> None:
    assert not [module.path for module in MODULES if FORBIDDEN_NAMES & set(module.name.split("."))]


def test_no_asserts_and_no_prints() -> None:
    asserts = [
        module.at(node)
        for module in MODULES
        for node in module.nodes()
        if isinstance(node, ast.Assert) and not module.path.stem.endswith(SUITES)
    ]
    prints = [
        module.at(node)
        for module in MODULES
        for node in module.nodes()
        if isinstance(node, ast.Call)
        and called(node) == "print"
        and module.component not in MAY_PRINT
    ]
    assert not asserts + prints


def test_examples_need_nothing_of_the_tests() -> None:
    """By import, or by path."""
    examples = [*ROOT.joinpath("examples").glob("*.py")]
    named = [
        path.name
        for path in examples
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Constant) and node.value == "tests")
        or (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"))
        or (isinstance(node, ast.Import) and any(n.name.startswith("tests") for n in node.names))
    ]
    assert examples
    assert not named


def test_the_public_names_are_frozen() -> None:
    assert sorted(shardwise.__all__) == PUBLIC
    assert [name for name in PUBLIC if not hasattr(shardwise, name)] == []


def test_public_signatures_are_precise() -> None:
    """Nothing public takes or gives an `object`, by its own annotations."""
    vague = []
    for name in PUBLIC:
        value = getattr(shardwise, name)
        methods = {key: each for key, each in vars(value).items() if not key.startswith("_")}
        for key, each in {"": value, **(methods if isinstance(value, type) else {})}.items():
            function = each.__init__ if isinstance(each, type) else getattr(each, "fget", each)
            given = getattr(function, "__annotations__", {})
            vague += [f"{name}.{key}: {hint}" for hint in given.values() if "object" in str(hint)]
    assert not vague
