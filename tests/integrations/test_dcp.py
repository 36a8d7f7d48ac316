"""The drop-in for torch.distributed.checkpoint: its files, and what torch saves and loads by it."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import shardwise as sw
from shardwise.integrations import dcp
from shardwise.integrations.dcp.names import DCP_METADATA
from tests.breadth import mostly_long
from tests.commands import run_command
from tests.formats.comparing import assert_same
from tests.multirank.models import WORLDS, build, module_of, train
from tests.multirank.test_matrix import contents
from tests.store.servers import Server, moto  # noqa: F401 - a fixture
from tests.tools.gang import Gang

KINDS = ("plain", "ddp", "fsdp1", "fsdp2", "fsdp2_uneven", "hsdp", "tp", "fsdp_tp", "pipeline_fsdp")
RESHARDED = [
    ("fsdp2_uneven", "plain"),
    ("tp", "plain"),
    ("plain", "fsdp2"),
    ("fsdp_tp", "tp"),
    ("fsdp2", "hsdp"),
    ("ddp", "fsdp2_uneven"),
    ("fsdp1", "fsdp_tp"),
]
"""The parallelism of a save, and the one of a load."""
FLATTENED = ("tp", "fsdp_tp", "pipeline_fsdp")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def state_of(state: dict[str, Any], *, flatten: bool) -> dict[str, Any]:
    """Return the state as torch's documentation saves it."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer = get_state_dict(
        module_of(state["model"]), state["optimizer"], options=options
    )
    rest = {"scheduler": state["scheduler"].state_dict(), "step": state["step"]}
    return {"model": model, "optimizer": optimizer, **rest}


def save_both(kind: str, root: str) -> None:
    """Train for two steps under a parallelism, and save with torch's writer and with ours."""
    warnings.simplefilter("ignore")
    state = build(kind, 1)
    train(state)
    saved = state_of(state, flatten=kind in FLATTENED)
    torch_dcp.save(saved, checkpoint_id=f"{root}/torch/{kind}")
    torch_dcp.save(saved, storage_writer=dcp.StorageWriter(f"{root}/ours/{kind}"))


Save = Callable[[str], Path]


@pytest.fixture(scope="module")
def save(gang: Gang, tmp_path_factory: pytest.TempPathFactory) -> Save:
    """A function that saves with both writers under a parallelism, and returns the folder."""
    root = tmp_path_factory.mktemp("dcp")

    def save(kind: str) -> Path:
        if not (root / "ours" / kind).exists():
            gang.run(save_both, kind, str(root), world=WORLDS[kind])
        return root

    return save


def everything(reader: torch_dcp.StorageReader) -> dict[str, Any]:
    """Return the state that torch loads without a template, through a reader."""
    state: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    return state


@pytest.mark.parametrize("kind", mostly_long(KINDS, ["plain", "pipeline_fsdp"]))
def test_the_writer_saves_what_torchs_writer_saves(save: Save, kind: str) -> None:
    ours, theirs = save(kind) / "ours" / kind, save(kind) / "torch" / kind
    checkpoint = sw.open(ours)
    assert (checkpoint.layout.format, checkpoint.world_size) == ("shardwise", WORLDS[kind])
    assert checkpoint.verify().bytes_checked == sum(f.size for f in checkpoint.layout.files)
    found, expected = contents(ours), contents(theirs)
    assert found.pop(DCP_METADATA)
    assert found == expected
    assert sum(name.endswith(".exp_avg") for name in found) == 4 * 6 + 2
    assert_same(everything(dcp.StorageReader(ours)), everything(torch_dcp.FileSystemReader(theirs)))


def load_natively(place: str, kind: str, copy: str) -> None:
    """Load with `sw.load` what the writer saved, and save it again with `sw.save`."""
    state = build(kind, 2)
    sw.load(place, state)
    sw.save(copy, state)


def load_by_dcp(place: str, kind: str, copy: str, *, flatten: bool = False) -> None:
    """Load through torch what the writer saved, and save it again with `sw.save`."""
    warnings.simplefilter("ignore")
    state = build(kind, 2)
    target = state_of(state, flatten=flatten)
    torch_dcp.load(target, storage_reader=dcp.StorageReader(place))
    set_state_dict(
        module_of(state["model"]),
        state["optimizer"],
        model_state_dict=target["model"],
        optim_state_dict=target["optimizer"],
        options=StateDictOptions(flatten_optimizer_state_dict=flatten),
    )
    state["scheduler"].load_state_dict(target["scheduler"])
    sw.save(copy, {**state, "step": target["step"]})


@pytest.mark.parametrize(("source", "kind"), mostly_long(RESHARDED, RESHARDED[1:3]))
def test_other_parallelisms_load_it(
    gang: Gang, save: Save, tmp_path: Path, source: str, kind: str
) -> None:
    """With `sw.load`, and through torch with the reader."""
    place, world = save(source) / "ours" / source, WORLDS[kind]
    gang.run(load_natively, str(place), kind, str(tmp_path / "a"), world=world)
    flatten = source in FLATTENED
    gang.run(load_by_dcp, str(place), kind, str(tmp_path / "b"), world=world, flatten=flatten)
    expected = contents(place)
    del expected[DCP_METADATA]
    assert contents(tmp_path / "a") == expected
    assert contents(tmp_path / "b") == expected


@pytest.mark.parametrize("source", ["native", "torch"])
def test_the_reader_reads_checkpoints_of_others(save: Save, tmp_path: Path, source: str) -> None:
    """Those that `sw.save` wrote, and foreign ones; torch's own state dicts take their contents."""
    state = build("plain", 1)
    train(state)
    if source == "native":
        sw.save(tmp_path / "step-00000007", state)
    place = tmp_path if source == "native" else save("fsdp2") / "torch" / "fsdp2"
    expected = state_of(state, flatten=False)
    other = build("plain", 2)
    target = state_of(other, flatten=False)
    dcp.load(target, checkpoint_id=place)
    assert_same(target, expected)


def values() -> dict[str, Any]:
    return {
        "text": "ä",
        "none": None,
        "float": [0.1, float("inf"), -0.0],
        "big": 2**70,
        "tuple": (1, (2, "x")),
        "bytes": b"\x00\xff",
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "empty": {"dict": {}, "list": [], "tuple": ()},
        "list": [{"a": 1}, [{"b": torch.ones(2)}, 5]],
        "inside": (torch.arange(3), {"deep": torch.zeros(0, 2)}),
        "dotted.key": {"x.y": 3},
        "keys": {1: "one", "2": "two"},
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "bool": torch.tensor([True, False]),
        "half": torch.randn(3, 5).half().t(),
        "complex": torch.randn(2, dtype=torch.complex64),
    }


def test_values_come_back_as_torch_itself_returns_them(tmp_path: Path) -> None:
    state = values()
    state["complex"] = state["complex"].conj()
    torch_dcp.save(state, checkpoint_id=tmp_path / "torch")
    dcp.save(state, checkpoint_id=tmp_path / "ours")
    targets = [values(), values()]
    for target in targets:
        target |= {"text": "", "float": [], "scalar": torch.zeros((), dtype=torch.float64)}
        target["half"] = torch.zeros(3, 5).half().t()
    torch_dcp.load(targets[0], checkpoint_id=tmp_path / "torch")
    dcp.load(targets[1], checkpoint_id=tmp_path / "ours")
    assert_same(targets[1], targets[0])
    assert_same(
        everything(dcp.StorageReader(tmp_path / "ours")),
        everything(torch_dcp.FileSystemReader(tmp_path / "torch")),
    )


def test_streams(tmp_path: Path) -> None:
    """Older versions of torchtitan save lists of losses as a BytesIO."""
    stream = BytesIO(b"losses")
    stream.seek(3)
    dcp.save({"train": {"losses": stream, "step": 2}}, checkpoint_id=tmp_path / "a")
    assert sw.open(tmp_path / "a")["train"] == {"losses": b"losses", "step": 2}
    target = {"train": {"losses": BytesIO(), "step": 0}}
    dcp.load(target, checkpoint_id=tmp_path / "a")
    losses = target["train"]["losses"]
    assert isinstance(losses, BytesIO)
    assert (losses.tell(), losses.getvalue()) == (3, b"losses")


def test_without_flattening(tmp_path: Path) -> None:
    """A nested dict is one value, with its tensors stored as tensors."""
    state = {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "t": torch.ones(2), "n": {"a": 1}}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, checkpoint_id=tmp_path / "a", planner=planner)
    assert sw.open(tmp_path / "a")["model.w"][1].tolist() == [3.0, 4.0, 5.0]
    target = {"model": {}, "t": torch.zeros(2), "n": {}}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(target, checkpoint_id=tmp_path / "a", planner=planner)
    assert_same(target, state)


class Application:
    """A Stateful, as torch's tutorial writes it."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1 * seed)
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )


def test_stateful_objects(tmp_path: Path) -> None:
    """Also below another key, and loaded natively by their parts."""
    app, other = Application(1), Application(2)
    dcp.save({"app": app}, checkpoint_id=tmp_path / "a")
    dcp.load({"app": other}, checkpoint_id=tmp_path / "a")
    assert_same(other.state_dict(), app.state_dict())
    third = Application(3)
    sw.load(tmp_path / "a", {"app": {"model": third.model, "optim": third.optimizer}})
    assert_same(third.state_dict(), app.state_dict())


def test_a_part_of_the_state_is_loaded(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2), "b": 3}, checkpoint_id=tmp_path / "a")
    target = {"a": torch.zeros(2), "new": torch.zeros(1)}
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: new"):
        dcp.load(target, checkpoint_id=tmp_path / "a")
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(target, checkpoint_id=tmp_path / "a", planner=planner)
    assert_same(target, {"a": torch.ones(2), "new": torch.zeros(1)})


def test_dtypes_are_converted(tmp_path: Path) -> None:
    dcp.save({"a": torch.tensor([1.5, 2.0])}, checkpoint_id=tmp_path / "a")
    target = {"a": torch.zeros(2, dtype=torch.bfloat16)}
    dcp.load(target, checkpoint_id=tmp_path / "a")
    assert_same(target["a"], torch.tensor([1.5, 2.0], dtype=torch.bfloat16))


class HalfPlanner(DefaultSavePlanner):
    """Saves in half precision, as the documentation of SavePlanner shows."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return data.to(torch.float16) if isinstance(data, torch.Tensor) else data


def test_planners_of_the_user(tmp_path: Path) -> None:
    state = {"a": {"w": torch.tensor([1.5, 2.0]), "n": 1}}
    dcp.save(state, checkpoint_id=tmp_path / "a", planner=HalfPlanner())
    saved = sw.open(tmp_path / "a")["a.w"]
    assert (saved.dtype, saved[...].tolist()) == (torch.float16, [1.5, 2.0])


def test_commands_take_the_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "run"
    app = Application(1)
    writer = dcp.StorageWriter(root / "step-00000003", step=3)
    dcp.save({"model": app.model.state_dict()}, storage_writer=writer)
    for command in (
        ["ls", root],
        ["verify", root / "step-00000003"],
        ["inspect", root / "step-00000003", "model.weight"],
        ["export", root / "step-00000003", tmp_path / "hf", "--to", "hf"],
    ):
        ran = run_command(*command)
        assert ran.status == 0, ran.err
    assert sw.Checkpointer(root).steps() == [3]
    assert torch.equal(sw.open(tmp_path / "hf")["model.weight"][...], app.model.weight)


def error_in(raised: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    """Return the error of shardwise in an error of DCP."""
    return next(iter(raised.value.failures.values()))[0]


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(50_000)}, checkpoint_id=tmp_path / "a")
    (file,) = (tmp_path / "a").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[100_000] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointException) as raised:
        dcp.load({"a": torch.zeros(50_000)}, checkpoint_id=tmp_path / "a")
    assert isinstance(error_in(raised), sw.CorruptionError)
    assert "these bytes belong to" in str(error_in(raised))


def test_step_and_metrics_are_stored(tmp_path: Path) -> None:
    writer = dcp.StorageWriter(tmp_path / "x", step=7, metrics={"loss": 0.5})
    dcp.save({"a": 1}, checkpoint_id=tmp_path / "a", storage_writer=writer)
    checkpoint = sw.open(tmp_path / "a")
    assert (checkpoint.step, checkpoint.metrics) == (7, {"loss": 0.5})
    assert not (tmp_path / "x").exists()


def test_an_existing_checkpoint_is_replaced_unless_that_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "a"
    for number in (1.0, 2.0):
        dcp.save({"a": torch.full((3,), number)}, checkpoint_id=place)
        assert len(list(place.iterdir())) == 2
    with pytest.raises(CheckpointException) as raised:
        dcp.save({"a": torch.zeros(3)}, storage_writer=dcp.StorageWriter(place, overwrite=False))
    assert isinstance(error_in(raised), sw.CheckpointExistsError)
    assert sw.open(place)["a" if "a" in sw.open(place) else "model.a"][0] == 2.0


class Unknown:
    """Has no plain form."""


def test_what_has_no_plain_form_is_refused(tmp_path: Path) -> None:
    dcp.save({"a": {"b": 1}}, checkpoint_id=tmp_path / "a")
    with pytest.raises(CheckpointException) as raised:
        dcp.save({"a": {"b": Unknown()}}, checkpoint_id=tmp_path / "a")
    assert isinstance(error_in(raised), sw.StateError)
    assert "a.b: " in str(error_in(raised))
    assert sw.open(tmp_path / "a")["a"] == {"b": 1}  # the previous checkpoint is intact
    writer = dcp.StorageWriter(tmp_path / "b", allow_pickle=True)
    dcp.save({"a": {"b": Unknown()}}, storage_writer=writer)
    with pytest.raises(CheckpointException) as raised:
        dcp.load({"a": {"b": None}}, checkpoint_id=tmp_path / "b")
    assert "pickle" in str(error_in(raised))
    target: dict[str, Any] = {"a": {"b": None}}
    reader = dcp.StorageReader(tmp_path / "b", allow_pickle=True)
    dcp.load(target, storage_reader=reader)
    assert isinstance(target["a"]["b"], Unknown)


def test_options_without_a_meaning_are_refused(tmp_path: Path) -> None:
    place = tmp_path / "a"
    state = {"a": torch.ones(1)}
    for save in (dcp.save, dcp.async_save):
        with pytest.raises(sw.StateError, match="use_collectives=False"):
            save(state, checkpoint_id=place, use_collectives=False)
        with pytest.raises(sw.StateError, match="it writes another format"):
            save(state, storage_writer=torch_dcp.FileSystemWriter(place))  # type: ignore[arg-type]
        with pytest.raises(sw.StateError, match="pass the path"):
            save(state)
    with pytest.raises(sw.StateError, match="use_collectives=False"):
        torch_dcp.save(state, storage_writer=dcp.StorageWriter(place), use_collectives=False)
    with pytest.raises(sw.StateError, match="it reads another format"):
        dcp.load(state, storage_reader=torch_dcp.FileSystemReader(place))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="thread_count"):
        dcp.StorageWriter(place, thread_count=2)  # type: ignore[call-arg]
    assert not place.exists()


def test_the_key_of_the_metadata_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="rename the key"):
        dcp.save({DCP_METADATA: 1}, checkpoint_id=tmp_path / "a")


def test_s3(moto: Server) -> None:  # noqa: F811
    url = moto.new_url()
    state = {"model": {"w": torch.arange(10.0)}, "step": 3}
    dcp.save(state, checkpoint_id=url)
    target = {"model": {"w": torch.zeros(10)}, "step": 0}
    dcp.load(target, checkpoint_id=url)
    assert_same(target, state)
    assert len(sw.open(url).layout.files) == 1


def sharded(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(torch.full((8, 3), value), mesh, [Shard(0)]), "n": value}


class FailingPlanner(DefaultSavePlanner):
    """Fails on rank 1 while it writes."""

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("broken on rank 1")
        return super().resolve_data(write_item)


def fail_to_save(place: str) -> None:
    warnings.simplefilter("ignore")
    dcp.save(sharded(1.0), checkpoint_id=place)
    with pytest.raises(CheckpointException, match="broken on rank 1"):
        dcp.save(sharded(2.0), checkpoint_id=place, planner=FailingPlanner())
    target = sharded(0.0)
    dcp.load(target, checkpoint_id=place)
    assert target["n"] == 1.0
    gc.collect()  # before torch 2.10, cycles hold the failed save
    dist.barrier()
    dcp.save(sharded(3.0), checkpoint_id=place)  # the lock of the failed save is gone
    with pytest.raises(CheckpointException) as raised:  # each rank alone has half of the tensor
        dcp.save(sharded(4.0), checkpoint_id=f"{place}-{dist.get_rank()}", no_dist=True)
    assert isinstance(error_in(raised), sw.LayoutError)


def test_a_save_that_fails_on_one_rank_changes_nothing(gang: Gang, tmp_path: Path) -> None:
    gang.run(fail_to_save, str(tmp_path / "a"), world=2)
    assert sw.open(tmp_path / "a")["n"] == 3.0
    assert len(list((tmp_path / "a").iterdir())) == 3


class KillingPlanner(DefaultSavePlanner):
    """Kills rank 1 while it writes."""

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)


def save_and_die(place: str) -> None:
    warnings.simplefilter("ignore")
    dcp.save(sharded(1.0), checkpoint_id=place)
    dcp.save(sharded(2.0), checkpoint_id=place, planner=KillingPlanner())


def save_once(place: str, number: float) -> None:
    warnings.simplefilter("ignore")
    dcp.save(sharded(number), checkpoint_id=place)


def test_a_killed_rank_leaves_the_previous_checkpoint(gang: Gang, tmp_path: Path) -> None:
    """The next save removes what the killed save left."""
    outcomes = gang.run_outcomes(save_and_die, str(tmp_path / "a"), world=2)
    assert outcomes[1].kind == "died"
    assert outcomes[0].kind != "value"
    checkpoint = sw.open(tmp_path / "a")
    assert checkpoint["n"] == 1.0
    assert checkpoint["w"][...].unique().tolist() == [1.0]
    checkpoint.verify()
    gang.run(save_once, str(tmp_path / "a"), 3.0, world=2)
    assert sw.open(tmp_path / "a")["n"] == 3.0
    assert len(list((tmp_path / "a").iterdir())) == 3


def save_in_a_group(place: str) -> None:
    """Only rank 1 saves and loads."""
    warnings.simplefilter("ignore")
    group = dist.new_group([1])
    if dist.get_rank() == 1:
        dcp.save({"a": torch.ones(3)}, checkpoint_id=place, process_group=group)
        target = {"a": torch.zeros(3)}
        dcp.load(target, checkpoint_id=place, process_group=group)
        assert_same(target["a"], torch.ones(3))


def test_a_process_group(gang: Gang, tmp_path: Path) -> None:
    gang.run(save_in_a_group, str(tmp_path / "a"), world=2)
    assert sw.open(tmp_path / "a").world_size == 1


def save_with_cached_plans(place: str) -> None:
    """As torchtitan does; a new writer for each save."""
    warnings.simplefilter("ignore")
    for number in (1.0, 2.0, 3.0):
        planner = DefaultSavePlanner(enable_plan_caching=True, dedup_save_to_lowest_rank=True)
        dcp.save(sharded(number), checkpoint_id=f"{place}/{number}", planner=planner)
        dcp.save(sharded(number), checkpoint_id=f"{place}/last", planner=planner)
    for step, number in {"1.0": 1.0, "2.0": 2.0, "last": 3.0}.items():
        target = sharded(0.0)
        dcp.load(target, checkpoint_id=f"{place}/{step}")
        assert target["n"] == number
        assert target["w"].to_local().unique().tolist() == [number]


def test_planners_cache_plans(gang: Gang, tmp_path: Path) -> None:
    gang.run(save_with_cached_plans, str(tmp_path), world=2)
    assert len(list((tmp_path / "last").iterdir())) == 3


class Fixed:
    """Saves a value as one object."""

    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


def test_hostile_metadata_is_refused(tmp_path: Path) -> None:
    """It names lists so long that torch would fill the memory, or what does not exist."""
    for number, metadata in enumerate(
        (
            {"paths": {"a": ["a", 10**9]}, "names": {}, "values": {}, "bytes_io": {}},
            {"paths": {"a": ["a"], "b": ["b"]}, "names": {}, "values": {}, "bytes_io": {}},
            {"paths": {"a": "a"}, "names": {}, "values": {}, "bytes_io": {}},
            {"paths": {}, "names": {}, "values": {}},
            {"paths": {}, "names": {}, "values": {}, "bytes_io": {"a": 1}},
            [],
        )
    ):
        place = tmp_path / str(number)
        sw.save(place, {"a": torch.ones(1), DCP_METADATA: Fixed(metadata)})
        reason = f"{place}: the value '{DCP_METADATA}' is invalid"
        with pytest.raises(CheckpointException, match=reason):
            dcp.load({"a": torch.zeros(1)}, checkpoint_id=place)


def test_a_foreign_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    torch_dcp.save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "a")
    with pytest.raises(CheckpointException) as raised:
        dcp.save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "a")
    assert isinstance(error_in(raised), sw.CheckpointExistsError)
    shutil.rmtree(tmp_path / "a")
    dcp.save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "a")
