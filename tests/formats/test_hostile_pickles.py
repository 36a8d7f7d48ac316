"""Pickles that somebody made to do harm: nothing runs, nothing is imported, nothing is huge."""

from __future__ import annotations

import copyreg
import pickle
import struct
import sys
import tracemalloc
import types
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from shardwise.kernel.errors import FormatError
from shardwise.parts.formats.containers.pickle_opcodes import OPERATIONS
from shardwise.parts.formats.containers.pickle_values import (
    ALLOWED_NAMES,
    AllowedCallable,
    PickledInstance,
    UnknownObject,
)
from shardwise.parts.formats.containers.pickles import unpickle
from shardwise.parts.formats.containers.torch_values import TORCH_NAMES
from shardwise.parts.formats.file_tree import FileTree
from shardwise.parts.formats.readers.dcp.metadata import read_metadata
from tests.breadth import examples

MOST_MEMORY = 16 << 20
GADGETS = """
    os.system posix.system nt.system os.execvp os.popen subprocess.Popen subprocess.check_output
    builtins.eval builtins.exec builtins.compile builtins.__import__ builtins.open builtins.apply
    builtins.globals builtins.vars builtins.setattr builtins.type builtins.map builtins.filter
    importlib.import_module runpy._run_code runpy.run_path code.InteractiveInterpreter
    pickle.loads _pickle.loads cloudpickle.loads dill.loads joblib.load marshal.loads shelve.open
    types.CodeType types.FunctionType functools.partial functools.reduce operator.attrgetter
    operator.methodcaller operator.itemgetter itertools.starmap ctypes.CDLL cffi.FFI pty.spawn
    socket.create_connection webbrowser.open shutil.rmtree pathlib.Path.unlink tempfile.mktemp
    bdb.Bdb.run pdb.Pdb.run cProfile.run profile.run timeit.timeit trace.Trace.run doctest.debug
    pip.main pip._internal.main pydoc.pipepager site.main distutils.file_util.write_file
    asyncio.unix_events._UnixSubprocessTransport._start logging.config.dictConfig
    numpy.load numpy.testing._private.utils.runstring numpy.f2py.crackfortran.myeval
    torch.load torch.hub.load torch.jit.load torch.storage._load_from_bytes torch.save
    torch.utils.collect_env.run torch._utils._import_dotted_name torch._inductor.codecache.compile
    torch.utils._config_module.load_config torch.fx.graph_module.reduce_graph_module
    torch._dynamo.guards.GuardBuilder.get torch.jit.unsupported_tensor_ops.execWrapper
    torch.utils.bottleneck.__main__.run_cprofile torch.serialization.add_safe_globals
    torch.distributed.rpc.api.rpc_sync torch.multiprocessing.reductions.rebuild_storage_fd
    transformers.pipeline idlelib.run.Executive.runcode lib2to3.pgen2.grammar.Grammar.loads
    copyreg.add_extension copyreg.__reduce_ex__ copyreg._slotnames sys.exit sys.settrace
""".split()  # noqa: SIM905 - a list of so many would be a page


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def named(name: str) -> bytes:
    module, _, last = name.rpartition(".")
    return f"c{module}\n{last}\n".encode()


@pytest.fixture
def nothing_is_imported() -> Iterator[None]:
    before = set(sys.modules)
    yield
    assert set(sys.modules) == before


@pytest.fixture
def canary(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """The calls of `canary.run`, and of all that could be done to `canary.Bird`."""
    calls: list[tuple[object, ...]] = []

    class Bird:
        def __init__(self, *args: object) -> None:
            calls.append(args)

        def __setstate__(self, state: object) -> None:
            calls.append((state,))

        def append(self, item: object) -> None:
            calls.append((item,))

    module = types.ModuleType("canary")
    module.run = lambda *args: calls.append(args)  # type: ignore[attr-defined]
    module.Bird = Bird  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "canary", module)
    return calls


ID = text("id") + b"\x85"
INIT = text("__init__")
WAYS = {
    "reduce": lambda name: named(name) + text("id") + b"\x85R.",
    "new object": lambda name: named(name) + text("id") + b"\x85\x81.",
    "new object with keywords": lambda name: named(name) + text("id") + b"\x85}\x92.",
    "name on the stack": lambda name: (
        text(name.rpartition(".")[0]) + text(name.rpartition(".")[2]) + b"\x93" + ID + b"R."
    ),
    "dotted name on the stack": lambda name: (
        text(name.partition(".")[0]) + text(name.partition(".")[2]) + b"\x93" + ID + b"R."
    ),
    "build": lambda name: named(name) + b"}" + text("__setstate__") + named(name) + b"sb.",
    "state of slots": lambda name: named(name) + b"N}" + INIT + named(name) + b"s\x86b.",
    "append": lambda name: named(name) + text("id") + b"a.",
    "items": lambda name: named(name) + b"(" + text("a") + text("b") + b"u.",
    "add": lambda name: named(name) + b"(" + text("a") + b"\x90.",
    "attribute": lambda name: named("builtins.getattr") + named(name) + INIT + b"\x86R.",
    "attribute of an attribute": lambda name: (
        named("builtins.getattr") * 2 + named(name) + text("__init__") + b"\x86R"
        + text("__globals__") + b"\x86R."
    ),
    "as the default of a dict": lambda name: (
        named("collections.defaultdict") + named(name) + b"\x85R" + text("key") + b"K\x01s."
    ),
    "as the rebuilder of a tensor": lambda name: (
        named("torch._tensor._rebuild_from_type_v2") + b"(" + named(name)
        + named("torch.Tensor") + text("id") + b"\x85NtR."
    ),
    "as the class of an instance": lambda name: (
        named("copyreg._reconstructor") + b"(" + named(name) + named("builtins.object") + b"NtR."
    ),
    "as a new object's class": lambda name: (
        named("copyreg.__newobj__") + b"(" + named(name) + text("id") + b"tR."
    ),
}  # fmt: skip


@pytest.mark.usefixtures("nothing_is_imported")
@pytest.mark.parametrize("way", WAYS)
def test_gadgets_are_names_and_nothing_else(way: str, canary: list[object]) -> None:
    for name in (*GADGETS, "canary.run", "canary.Bird"):
        data = WAYS[way](name)
        with pytest.raises(FormatError, match=name.rpartition(".")[2].replace("+", "")):
            unpickle(data, "it", also_allowed=TORCH_NAMES)
        read, _ = unpickle(data, "it", also_allowed=TORCH_NAMES, skip_unknown=True)
        assert read in (UnknownObject(name), {"key": 1})
    assert not canary


@pytest.mark.parametrize("protocol", range(2, 6))
def test_an_object_that_reduces_to_a_call(protocol: int, canary: list[object]) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return sys.modules["canary"].Bird, ("id",), {"a": 1}, iter([1]), iter([(1, 2)])

    bird = sys.modules["canary"].Bird
    bird.__qualname__, bird.__module__ = "Bird", "canary"
    data = pickle.dumps({"weights": [Attack()]}, protocol)
    canary.clear()
    with pytest.raises(FormatError, match=r"canary\.Bird \(at weights\.0\); shardwise ran no code"):
        unpickle(data, "it")
    assert unpickle(data, "it", skip_unknown=True)[0] == {"weights": [UnknownObject("canary.Bird")]}
    assert not canary


PLAIN = (
    str,
    bytes,
    bytearray,
    list,
    dict,
    set,
    frozenset,
    tuple,
    int,
    float,
    complex,
    range,
    slice,
)
INERT = (*PLAIN, PickledInstance, AllowedCallable, torch.device, torch.dtype, np.ndarray)


@pytest.mark.usefixtures("nothing_is_imported")
@pytest.mark.parametrize("way", WAYS)
def test_names_of_the_list_do_nothing_else_than_they_should(way: str) -> None:
    for name in (*ALLOWED_NAMES, *TORCH_NAMES):
        try:
            value = unpickle(WAYS[way](name), "it", also_allowed=TORCH_NAMES)[0]
        except FormatError:
            continue
        assert value is None or isinstance(value, INERT), (name, value)


@pytest.mark.parametrize("op", [b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00"])
def test_registered_extensions_are_not_looked_up(op: bytes, canary: list[object]) -> None:
    copyreg.add_extension("canary", "run", 1)
    try:
        with pytest.raises(FormatError, match="opcode"):
            unpickle(b"\x80\x02" + op + b"(tR.", "it")
    finally:
        copyreg.remove_extension("canary", "run", 1)
    assert not canary


@pytest.mark.parametrize(
    "data",
    [
        b"(S'id'\nios\nsystem\n.",
        b"(cos\nsystem\nS'id'\no.",
        b"Pcos\n.",
        b"I1\n.",
        b"L1L\n.",
        b"F1\n.",
        b"V\\u0041\n.",
        b"(lp0\n.",
        b"(d.",
        b"\x97.",
        b"\x97\x98.",
        b"\x80\x06N.",
        b"Vx\nQ.",
        b"NQ.",
    ],
)
def test_opcodes_that_no_saver_needs_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        unpickle(data, "it")
    with pytest.raises(FormatError):
        unpickle(data, "it", skip_unknown=True)


DEEP = 100_000
HUGE = {
    "memo got": b"Nj\xff\xff\xff\x7f.",
    "text": b"\x8d" + struct.pack("<Q", 2**60) + b"a.",
    "text of 4 GiB": b"X\xff\xff\xff\xff.",
    "bytes": b"\x8e" + struct.pack("<Q", 2**60) + b"a.",
    "bytearray": b"\x96" + struct.pack("<Q", 2**63) + b"a.",
    "number": b"\x8b\xff\xff\xff\x7f.",
    "frame": b"\x95" + struct.pack("<Q", 2**63) + b"N.",
    "zeros": named("builtins.bytes") + b"J\xff\xff\xff\x7f\x85R.",
    "zeros that change": named("builtins.bytearray") + b"J\xff\xff\xff\x7f\x85R.",
    "list of a range": (
        named("builtins.list") + named("builtins.range") + b"J\xff\xff\xff\x7f\x85R\x85R."
    ),
    "array": named("numpy.ndarray") + b"J\xff\xff\xff\x7f\x85R\x85R.",
    "array's shape": (
        named("numpy._core.multiarray._reconstruct") + b")R(K\x01J\xff\xff\xff\x7f\x85"
        + named("numpy.dtype") + text("f8") + b"\x85RNC\x00tb."
    ),
    "dtype": named("numpy.dtype") + text("V2147483647") + b"\x85R.",
    "dtype of objects": named("numpy.dtype") + text("O") + b"\x85R.",
    "dtype that is a program": named("numpy.dtype") + text("(2,)f4,(3,)O") + b"\x85R.",
    "codec": named("_codecs.encode") + text("aa") + text("zip") + b"\x86R.",
    "lists within lists": b"]" * DEEP + b"a" * (DEEP - 1) + b".",
    "tuples within tuples": b")" + b"\x85" * DEEP + b".",
    "a key of tuples within tuples": b"})" + b"\x85" * DEEP + b"Ns.",
    "a key that unfolds": b"}K\x01" + b"2\x86" * 60 + b"Ns.",
    "a member that unfolds": b"\x8f(K\x01" + b"2\x86" * 60 + b"\x90.",
    "a value that unfolds": b"]q\x00" + b"2\x86" * 60 + b".",
    "lists that unfold": b"]q\x00" + b"".join(
        b"](h%ch%ceq%c" % (i, i, i + 1) for i in range(60)
    ) + b".",
    "lists within lists that are known": b"](]q\x00" + b"".join(
        b"](h%ceq%c" % (i, i + 1) for i in range(200)
    ) + b"e.",
    "a list that holds itself": b"]q\x00h\x00a.",
    "a dict that holds itself": b"}q\x00K\x01h\x00s.",
    "an instance that contains itself": (
        named("argparse.Namespace") + b")\x81q\x00}" + text("a") + b"h\x00sb."
    ),
    "marks": b"(" * DEEP + b".",
}  # fmt: skip


def test_a_memo_of_large_numbers_is_small() -> None:
    tracemalloc.start()
    try:
        assert unpickle(b"Nr\xff\xff\xff\x7f.", "it")[0] is None
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", HUGE)
def test_what_would_be_huge_or_endless_is_refused(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            unpickle(HUGE[name], "it")
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY + 200 * len(HUGE[name])
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"N",
        b"NN.",
        b"0.",
        b"a.",
        b"t.",
        b"u.",
        b"R.",
        b"b.",
        b"\x81.",
        b"\x93.",
        b"\x94.",
        b"2.",
        b"\x86.",
        b"h\x00.",
        b"q\x00.",
        b"cos\n",
        b"c",
        b"K",
        b"G\x00.",
        b"NNR.",
        b"NN\x93.",
        b"N)R.",
        b"NNb.",
        b"]K\x01b.",
        b"NNNs.",
        b"](K\x01u.",
        b"}(K\x01u.",
        b"}]Ns.",
        b"K\x01K\x02a.",
        b"1.",
        b"((((1tt.",
        b"X\x02\x00\x00\x00\xff\xff.",
        b"\x80",
    ],
)
def test_what_makes_no_sense_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        unpickle(data, "it")


MODULUS = sys.hash_info.modulus
ALIKE = {
    "integers": [MODULUS * i for i in range(1, 200)],
    "floats": [2.0 ** (61 * i) for i in range(-16, 16)] + [MODULUS * i for i in range(1, 200)],
    "tuples of integers": [(MODULUS * i,) for i in range(200)],
    "numbers in nested tuples": [("x", (MODULUS * i, 1)) for i in range(200)],
}


@pytest.mark.parametrize("name", ALIKE)
def test_keys_with_one_hash_are_refused_before_they_are_compared(name: str) -> None:
    keys = ALIKE[name]
    assert len({hash(key) for key in keys[-150:]}) == 1
    values: list[object] = [
        dict.fromkeys(keys),
        set(keys),
        frozenset(keys),
        OrderedDict.fromkeys(keys),
    ]
    pickles = [pickle.dumps(value, protocol) for value in values for protocol in (2, 4)]
    pickles.append(b"}" + b"".join(pickle.dumps(key, 2)[2:-1] + b"Ns" for key in keys) + b".")
    for data in pickles:
        with pytest.raises(FormatError, match="more than 64 keys have the same hash"):
            unpickle(data, "it")


def test_keys_of_all_kinds_are_read() -> None:
    keys = [0, -1, -2, 2**70, 2**48, 0.5, (1, 2), ("a", 3), b"x", None, True, 1e300, frozenset({1})]
    value = {"some": dict.fromkeys(keys), "more": [{MODULUS: i} for i in range(100)]}
    for protocol in (2, 4):
        assert unpickle(pickle.dumps(value, protocol), "it")[0] == value


def test_state_is_set_on_nothing_that_others_see() -> None:
    for name in (*ALLOWED_NAMES, *TORCH_NAMES):
        data = named(name) + b"}" + text("build") + b"Nsb."
        with pytest.raises(FormatError):
            unpickle(data, "it", also_allowed=TORCH_NAMES)
    assert all(callable(operation) for operation in OPERATIONS)


GOOD = pickle.dumps(
    {"a": [1, (2, 3.5), "x" * 300], "b": np.arange(3), ("c", 1): {1, 2}, "d": b"y", "e": 2**70}, 2
)


@examples(150)
@given(
    st.binary(max_size=60)
    | st.lists(st.sampled_from(b"(]}()tqhsuaeRbK.NX\x00\x01\x85\x86\x93\x81")).map(bytes)
)
def test_any_bytes_give_a_value_or_a_refusal(data: bytes) -> None:
    read_or_refuse(data)


@examples(150)
@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255), st.integers(0, len(GOOD)))
def test_an_altered_pickle_gives_a_value_or_a_refusal(at: int, byte: int, cut: int) -> None:
    altered = bytearray(GOOD)
    altered[at] = byte
    read_or_refuse(bytes(altered))
    with pytest.raises(FormatError):
        unpickle(GOOD[: min(cut, len(GOOD) - 1)], "it")


def read_or_refuse(data: bytes) -> None:
    with suppress(FormatError):
        unpickle(data, "it", also_allowed=TORCH_NAMES)
    with suppress(FormatError):
        unpickle(data, "it", also_allowed=TORCH_NAMES, skip_unknown=True)


def test_items_of_dcp_whose_offsets_have_one_hash_are_told_apart_by_text(tmp_path: Path) -> None:
    offsets = [torch.Size(each) for each in product((0, MODULUS, 2 * MODULUS), repeat=5)]
    places = {MetadataIndex("w", each): _StorageInfo("__0_0.distcp", 0, 8) for each in offsets}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data=places)))
    assert len(read_metadata(FileTree(tmp_path)).items) == len(offsets)
