"""Entry points of other packages are found, errors name the package, and the switch turns them off.

A package that is broken disturbs only programs that use it.
"""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.testing.thread_group import ThreadGroup, run_ranks

STORES = "shardwise.stores"
BROKEN = {
    "no module": "",
    "error": "raise RuntimeError('cannot start')",
    "exit": "import sys; sys.exit('cannot start')",
    "no function": "something_else = 1",
    "not Python": "def (",
    "failing function": "def it(*args):\n    raise KeyError('cannot start')",
    "exiting function": "def it(*args):\n    raise SystemExit(3)",
}
"""Code of a module whose function `it` is a plug-in."""


def install(folder: Path, package: str, entries: str, group: str = STORES) -> None:
    """Install a package that has entry points only."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{entries}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


@pytest.fixture(params=BROKEN)
def broken(request: pytest.FixtureRequest, site: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The entry point of a broken plug-in."""
    name = f"broken_{'_'.join(request.param.split())}"
    if BROKEN[request.param]:
        (site / f"{name}.py").write_text(BROKEN[request.param])
    monkeypatch.delitem(sys.modules, name, raising=False)
    return f"{name}:it"


def test_plugins_are_imported_only_when_they_are_used(site: Path) -> None:
    install(site, "good", "one = store_of_good:open_it\ntwo = no_such_module:it")
    (site / "store_of_good.py").write_text(
        "from shardwise.ports.store import open_store\n"
        "def open_it(url):\n"
        "    return open_store('/' + url.partition('://')[2])\n"
    )
    sw.save(f"one:/{site}/saved", {"step": 7})
    assert sw.open(site / "saved")["step"] == 7
    assert "no_such_module" not in sys.modules
    with pytest.raises(
        sw.StateError, match=r"package good provides shardwise.stores 'two'.*no_such"
    ):
        sw.open("two://place")


def test_two_plugins_of_one_name_are_an_error_where_the_name_is_used(site: Path) -> None:
    install(site, "first", "one = math:sqrt\nother = math:log")
    install(site, "second", "one = math:exp")
    with pytest.raises(sw.StateError, match=r"several packages provide .*first .*second "):
        sw.open("one://place")
    with pytest.raises(sw.StateError, match=r"package first .* math:log failed"):
        sw.open("other://place")


def test_a_broken_reader_of_a_known_format_is_named(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The format is recognised without it, so nothing is saved there."""
    install(site, "other", "torchsnapshot = no_such_module:it", "shardwise.readers")
    monkeypatch.setenv("SHARDWISE_PLUGINS", "other")
    place = site / "snapshot"
    place.mkdir()
    (place / ".snapshot_metadata").write_text("{}")
    for format_ in (None, "torchsnapshot"):
        with pytest.raises(sw.StateError, match=r"package other provides .*no_such_module"):
            sw.open(place, format=format_)
    with pytest.raises(sw.CheckpointExistsError, match="torchsnapshot"):
        sw.save(place, {"w": torch.ones(2)})


def test_what_a_plugin_makes_is_checked(site: Path) -> None:
    install(site, "made", "one = builtins:len\nother = math:log")
    with pytest.raises(sw.StateError, match=r"package made .* returned an? int instead of a Store"):
        sw.open("one://place")
    with pytest.raises(sw.StateError, match=r"package made .* math:log failed: TypeError"):
        sw.open("other://place")


def test_a_broken_store_is_named_if_it_is_used(site: Path, broken: str) -> None:
    install(site, "bad", f"one = {broken}")
    sw.save(site / "saved", {"step": 7})
    with pytest.raises(sw.StateError, match=r"the package bad .*SHARDWISE_PLUGINS"):
        sw.open("one://place")


def save_and_load(path: Path) -> None:
    sw.save(path, {"w": torch.arange(4.0), "step": 7})
    state = {"w": torch.zeros(4), "step": 0}
    sw.load(path, state)
    assert state["w"].tolist() == [0, 1, 2, 3]
    assert state["step"] == 7


def test_a_broken_binding_disturbs_only_states_with_its_types(
    site: Path, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (site / "rows.py").write_text(
        "import torch\n"
        "class Rows:\n"
        "    def state_dict(self): return {'a': 1}\n"
        "    def load_state_dict(self, state): pass\n"
        "class Layer(torch.nn.Linear):\n"
        "    pass\n"
    )
    monkeypatch.delitem(sys.modules, "rows", raising=False)
    import rows  # type: ignore[import-not-found]

    install(site, "bad", f"rows = {broken}", "shardwise.bindings")
    with caplog.at_level(logging.WARNING, "shardwise"):
        save_and_load(site / "saved")
        sw.save(
            site / "model", {"model": torch.nn.Linear(2, 2), "odd": object().__class__.__name__}
        )
    mine = type("Mine", (rows.Rows,), {})()
    inside = torch.nn.Sequential(torch.nn.Linear(2, 2), rows.Layer(2, 2))
    for value in (rows.Rows(), mine, rows.Layer(2, 2), inside, [rows.Layer(2, 2)]):
        with pytest.raises(sw.StateError, match=r"the package bad .*SHARDWISE_PLUGINS"):
            sw.save(site / "rows", {"table": value})
    monkeypatch.setenv("SHARDWISE_PLUGINS", "off")
    sw.save(site / "rows", {"table": rows.Rows()})
    assert sw.open(site / "rows")["table"] == {"a": 1}


BINDING = """
from shardwise.ports.binding import Binding, LocalState
class One(Binding):
    def __init__(self, name): self.name = name
    def local_state(self): return LocalState()
def bind(name, value, context):
    return One(name) if type(value).__name__ in {types} else None
"""


def test_two_packages_may_bind_types_of_one_module(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "tables.py").write_text("class A: pass\nclass B: pass\nclass C: pass\n")
    monkeypatch.delitem(sys.modules, "tables", raising=False)
    import tables  # type: ignore[import-not-found]

    for name, types in (("first", {"A", "C"}), ("second", {"B", "C"})):
        (site / f"bind_{name}.py").write_text(BINDING.replace("{types}", repr(types)))
        install(site, name, f"tables = bind_{name}:bind", "shardwise.bindings")
        monkeypatch.delitem(sys.modules, f"bind_{name}", raising=False)
    sw.save(site / "a", {"a": tables.A(), "b": tables.B(), "step": 3})
    with pytest.raises(sw.StateError, match="first and second both bind this C"):
        sw.save(site / "c", {"c": tables.C()})
    monkeypatch.setenv("SHARDWISE_PLUGINS", "Second")
    sw.save(site / "c", {"c": tables.C()})
    with pytest.raises(sw.StateError, match="a"):
        sw.save(site / "d", {"a": tables.A()})


def test_a_broken_hook_disturbs_no_run(
    site: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    install(site, "bad", f"log = {broken}\nother = {broken}", "shardwise.hooks")
    with (
        caplog.at_level(logging.WARNING, "shardwise"),
        sw.Checkpointer(site / "run", memory=None) as checkpointer,
    ):
        checkpointer.save(1, {"step": 1})
    assert "ignored: the package bad provides shardwise.hooks 'log'" in caplog.text
    assert [each.step for each in sw.list_checkpoints(site / "run").checkpoints] == [1]


def test_a_broken_read_strategy_disturbs_no_load(site: Path, broken: str) -> None:
    install(site, "bad", f"fast = {broken}", "shardwise.read_strategies")
    sw.save(site / "saved", {"w": torch.arange(4.0)})

    def load(group: ThreadGroup) -> list[float]:
        state = {"w": torch.zeros(4)}
        sw.load(site / "saved", state, group=group)
        values: list[float] = state["w"].tolist()
        return values

    assert run_ranks(2, load) == [[0.0, 1.0, 2.0, 3.0]] * 2


def test_a_broken_reader_disturbs_no_other_format(
    site: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    install(site, "bad", f"odd = {broken}\ntorch = {broken}", "shardwise.readers")
    torch.save({"w": torch.arange(4.0)}, site / "w.pt")
    with caplog.at_level(logging.WARNING, "shardwise"):
        assert sw.open(site / "w.pt")["model.w"][:].tolist() == [0, 1, 2, 3]
        assert sw.open(site / "w.pt", format="torch")["model.w"][:].tolist() == [0, 1, 2, 3]
    assert "ignored: the package bad provides shardwise.readers 'odd'" in caplog.text
    assert f"{broken} of the package bad is registered as a reader of 'torch'" in caplog.text
    (site / "other.txt").write_text("nothing")
    with pytest.raises(sw.CheckpointNotFoundError, match=r"Not asked: the package bad .*'odd'"):
        sw.open(site / "other.txt")
    with pytest.raises(sw.StateError, match=r"the package bad .*'odd'"):
        sw.open(site / "w.pt", format="odd")


FAILING_READER = """
from shardwise.parts.formats.reader import Reader
def recognise(tree):
    raise {error}
READER = Reader("odd", recognise, lambda tree, builder: None)
"""


@pytest.mark.parametrize("error", ["KeyError('x')", "SystemExit(3)"])
def test_a_reader_that_cannot_recognise_disturbs_no_other_format(
    site: Path, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "failing.py").write_text(FAILING_READER.replace("{error}", error))
    monkeypatch.delitem(sys.modules, "failing", raising=False)
    install(site, "bad", "odd = failing:READER", "shardwise.readers")
    torch.save({"w": torch.arange(4.0)}, site / "w.pt")
    assert sw.open(site / "w.pt")["model.w"][:].tolist() == [0, 1, 2, 3]
    with pytest.raises(sw.StateError, match=r"the package bad .*'odd'"):
        sw.open(site / "w.pt", format="odd")


@pytest.mark.parametrize(
    "content", [b"[shardwise.stores]\nx = \xff\xfe\n", b"[x]\nno pair\n", b"\0"]
)
def test_metadata_that_cannot_be_read_disturbs_nobody(
    site: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "bad", "")
    (site / "bad-1.0.dist-info" / "entry_points.txt").write_bytes(content)
    install(site, "good", "one = builtins:len")
    save_and_load(site / "saved")
    with pytest.raises(sw.StateError, match="package good"):
        sw.open("one://place")
    monkeypatch.setenv("SHARDWISE_PLUGINS", "off")
    save_and_load(site / "again")


@pytest.mark.parametrize(
    ("switch", "is_used"),
    [("", True), ("off", False), ("good", True), ("other, Good", True), ("other", False)],
)
def test_the_switch_chooses_packages(
    site: Path, monkeypatch: pytest.MonkeyPatch, switch: str, is_used: bool
) -> None:
    install(site, "good", "one = builtins:len")
    monkeypatch.setenv("SHARDWISE_PLUGINS", switch)
    with pytest.raises(sw.ShardwiseError) as caught:
        sw.open("one://place")
    assert ("the package good" in str(caught.value)) == is_used


HALVES = """
import torch
from shardwise.ports.binding import Binding, Box, Fragment, LocalState, TensorLeaf
class Halves:
    def __init__(self, rank, value): self.rank, self.a = rank, torch.full((4,), value)
class HalvesBinding(Binding):
    def __init__(self, name, value): self.name, self.value = name, value
    def leaf(self, key, parts):
        parts = tuple(Fragment(Box((start,), (data.numel(),)), data) for start, data in parts)
        return TensorLeaf(f"{self.name}.{key}", torch.float32, (4,), parts)
    def local_state(self):
        a, is_first = self.value.a, self.value.rank % 2 == 0
        first = [(0, a)] if is_first else [(4, a[4:])]
        return LocalState(tensors=[self.leaf("a", first), self.leaf("b", [(0, torch.ones(4))])])
def bind(name, value, context):
    return HalvesBinding(name, value) if isinstance(value, Halves) else None
"""
"""A binding that returns an empty fragment of one tensor on each second rank."""


def test_empty_fragments_are_left_out(site: Path) -> None:
    install(site, "halves", "halves_of_tensors = halves_of_tensors:bind", "shardwise.bindings")
    (site / "halves_of_tensors.py").write_text(HALVES)
    module = importlib.import_module("halves_of_tensors")

    def save_and_load(group: ThreadGroup) -> torch.Tensor:
        path = site / "checkpoint"
        sw.save(path, {"x": module.Halves(group.rank, 7.0)}, group=group)
        target = module.Halves(group.rank, 0.0)
        sw.load(path, {"x": target}, group=group)
        return target.a

    for rank, loaded in enumerate(run_ranks(4, save_and_load)):
        assert loaded.tolist() == [7.0 * (rank % 2 == 0)] * 4


def test_folders_of_other_libraries_beside_a_manifest_do_not_hide_it(tmp_path: Path) -> None:
    sw.save(tmp_path, {"w": torch.ones(2)})
    for name in ("weights", "context"):  # as NeMo has them
        (tmp_path / name).mkdir()
    assert sw.open(tmp_path)["w"].tensor().tolist() == [1.0, 1.0]
