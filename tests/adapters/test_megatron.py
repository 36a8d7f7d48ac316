"""Models and optimizers of Megatron-Core, saved and loaded as they are, whatever divides them."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from tests.breadth import mostly_long
from tests.formats.foreign_goldens import unpacked
from tests.multirank.test_matrix import contents
from tests.tools.agents import end_agents
from tests.tools.gang import GangError
from tests.tools.hosted_gang import HostedGang, hosted_gang

pytestmark = [
    pytest.mark.timeout(600),  # the first test waits for all trainings
    pytest.mark.ranks,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None,
        reason="Megatron-Core is not installed: pip install '.[frameworks]'",
    ),
]

LLAMA = {"llama": True, "tied": False, "clip": 0.0}
MOE = {**LLAMA, "experts": 4}
# Trained on four ranks. Where TP × PP is 2, there are two data-parallel ranks.
TRAINED: dict[str, dict[str, Any]] = {
    "float32": {"tp": 2, "pp": 2, "clip": 0.0},
    "bfloat16": {"tp": 2, "pp": 2, "bf16": True, **LLAMA},
    "distributed": {"tp": 2, "distributed": True, "bucket": 3000, "clip": 0.0},
    "distributed-bfloat16": {"tp": 2, "distributed": True, "bf16": True, **LLAMA},
    "float16": {"tp": 2, "fp16": True, "wrapped": True, "distributed": True, **LLAMA},
    "frozen": {"tp": 2, "frozen": True, "distributed": True, "bf16": True, **LLAMA},
    "untrained": {"pp": 2, "steps": 0, "distributed": True, "clip": 0.0},
    "interleaved": {"pp": 2, "vp": 2, "distributed": True, "clip": 0.0},
    "experts": {"pp": 2, "ep": 2, "distributed": True, "bf16": True, **MOE},
    "layer-wise": {"muon": "layer-wise", "clip": 0.0},
    "layer-wise-bfloat16": {"muon": "layer-wise", "bf16": True, **LLAMA},
}
# What goes on from them: source, ranks, and how they are divided then.
RESUMED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "pipeline": ("float32", 2, {"pp": 2}),
    "pipeline-distributed": ("float32", 4, {"pp": 2, "distributed": True, "bucket": 2000}),
    "three": ("float32", 3, {"distributed": True, "stepped": 1}),
    "one": ("distributed", 1, {}),
    "other-buckets": ("distributed", 4, {"tp": 2, "distributed": True, "stepped": 1}),
    "overlapping": ("distributed", 2, {"distributed": True, "bucket": 9000, "gather": True}),
    "interleaved-again": ("interleaved", 2, {"pp": 2, "vp": 2}),
    "flat": ("interleaved", 3, {"distributed": True}),
    "bfloat16-distributed": ("bfloat16", 3, {"distributed": True, "stepped": 1}),
    "bfloat16-wide": ("bfloat16", 4, {"tp": 4, "distributed": True}),
    "bfloat16-plain": ("distributed-bfloat16", 2, {"tp": 2}),
    "float16-stages": ("float16", 2, {"pp": 2, "wrapped": True}),
    "frozen-stages": ("frozen", 2, {"pp": 2, "frozen": True}),
    "untrained-before": ("untrained", 3, {"distributed": True, "stepped": 1}),
    "experts-alone": ("experts", 1, {}),
    "experts-divided": ("experts", 3, {"distributed": True}),
    "layer-wise-three": ("layer-wise", 3, {"muon": "layer-wise", "stepped": 1}),
    "layer-wise-chained": ("layer-wise", 2, {"muon": "chained"}),
    "layer-wise-stages": ("layer-wise-bfloat16", 4, {"pp": 2, "muon": "layer-wise"}),
    "experts-elsewhere": ("experts", 4, {"ep": 4, "distributed": True, "stepped": 1}),
}
DEFAULT = [  # each feature is loaded once
    *("overlapping", "interleaved-again", "float16-stages", "frozen-stages"),
    *("untrained-before", "experts-elsewhere", "layer-wise-stages"),
]
RUNS = mostly_long([*TRAINED, *RESUMED], [*DEFAULT, *(RESUMED[name][0] for name in DEFAULT)])
# What Megatron-Core wrote itself, and what goes on from it.
SMALL = {"layers": 2, "hidden": 8, "heads": 2, "vocab": 16, "length": 4, "tied": False}
FOREIGN: dict[str, tuple[str, int, dict[str, Any]]] = {
    "plain": ("plain", 4, {"tp": 2, "distributed": True}),
    "bfloat16": ("bfloat16", 3, {"bf16": True, "distributed": True}),
    "bfloat16-stages": ("bfloat16", 2, {"bf16": True, "pp": 2}),
    "distributed": ("fully_reshardable", 2, {"pp": 2}),
    "newer": ("fully_reshardable_0.19", 2, {"pp": 2, "distributed": True}),
    "flattened": ("fully_sharded_model_space", 1, {"distributed": True}),
}
STATE = {"model", "optimizer"}
RENAMED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def on_ranks(workers: HostedGang, world: int, name: str, *args: Any) -> list[Any]:
    """What a function of the training returns on each rank of a world."""
    bounds = {"timeout": 240.0, "group_timeout": 120.0}  # four imports may take long
    return workers.run(call, name, *args, world=world, **bounds)


def call(name: str, *args: Any) -> Any:
    """A function of what is imported by workers only, for it changes torch."""
    warnings.simplefilter("ignore")  # there are dozens, on every rank
    return getattr(importlib.import_module("tests.adapters.megatron_training"), name)(*args)


@pytest.fixture(scope="module")
def workers() -> Iterator[HostedGang]:
    """A gang whose server imports Megatron-Core, which changes torch."""
    with hosted_gang(4, ["tests.preloaded", "tests.adapters.megatron_training"]) as gang:
        yield gang


class Runs:
    """A folder with checkpoints of all runs, and what they had."""

    def __init__(self, root: Path, workers: HostedGang) -> None:
        self.root = root
        self._workers = workers
        self._found: dict[str, list[dict[str, Any]]] = {}
        self._contents: dict[str, dict[str, object]] = {}

    def of(self, name: str) -> dict[str, Any]:
        """What the ranks told of a run, made first if it is the first time."""
        if name not in self._found:
            self._found[name] = self._trained(name) if name in TRAINED else self._resumed(name)
        found = self._found[name]
        return {**found[0], "after": next(each["after"] for each in found if each["after"])}

    def contents(self, name: str) -> dict[str, object]:
        """What the checkpoint of a run holds, which is read once."""
        if name not in self._contents:
            self._contents[name] = contents(self.root / name)
        return self._contents[name]

    def _trained(self, name: str) -> list[dict[str, Any]]:
        place = str(self.root / name)
        return on_ranks(self._workers, 4, "save", TRAINED[name], place)

    def _resumed(self, name: str) -> list[dict[str, Any]]:
        source, world, division = RESUMED[name]
        self.of(source)
        alike = {k: v for k, v in TRAINED[source].items() if k in {*MOE, "bf16", "fp16"}}
        places = str(self.root / source), str(self.root / name)
        return on_ranks(self._workers, world, "go_on", {**alike, **division}, *places)


@pytest.fixture(scope="module")
def runs(workers: HostedGang, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("megatron"), workers)


def expected(run: dict[str, Any], names: set[str]) -> dict[str, torch.Tensor]:
    """What Megatron-Core has, by the names that are wanted; experts are stacked."""
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for key, tensor in run["expected"].items():
        name, kind = key.split("|")
        if kind == "weight" and f"{name}|param" in run["expected"]:
            continue
        for module, saved in RENAMED.items():
            name = name.replace(module, saved)
        weight = kind in ("weight", "param")
        full = f"model.{name}" if weight else f"optimizer.{name}.{kind}"
        before, _, after = full.partition(".local_experts.")
        number, _, rest = after.partition(".")
        if after:
            experts.setdefault(f"{before}.experts.{rest}", {})[int(number)] = tensor
        else:
            found[full] = tensor
    for full, each in experts.items():
        stacked = torch.stack([each[number] for number in sorted(each)])
        found[full] = stacked[0] if full.endswith(".step") else stacked
    # Of tied embeddings, the other stage's are copies.
    if not any(".output_layer." in name for name in names):
        found = {name: each for name, each in found.items() if ".output_layer." not in name}
    return found


@pytest.mark.parametrize("name", RUNS)
def test_all_is_as_megatron_has_it(runs: Runs, name: str) -> None:
    run = runs.of(name)
    assert_as_had(runs.contents(name), run)


def assert_as_had(saved: dict[str, object], run: dict[str, Any]) -> None:
    """The tensors in a checkpoint are those of a run, to the byte, and no others."""
    tensors = {key: each for key, each in saved.items() if isinstance(each, tuple)}
    wanted = expected(run, {*tensors})
    assert {*wanted} == {*tensors}
    for key, tensor in wanted.items():
        held = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert tensors[key] == (tensor.dtype, tensor.shape, held), key


@pytest.mark.long  # "experts-elsewhere" divides experts otherwise, too
def test_experts_are_divided_by_tensors_too(
    runs: Runs, workers: HostedGang, tmp_path: Path
) -> None:
    """Which Megatron-Core cannot train on a CPU."""
    runs.of("experts")
    again = tmp_path / "again"
    case = {**MOE, "tp": 2, "ep": 2, "bf16": True, "distributed": True}
    found = on_ranks(workers, 4, "load", case, str(runs.root / "experts"), str(again))
    after = contents(again)
    assert_as_had(after, found[0])
    assert after == {k: v for k, v in runs.contents("experts").items() if k != "scheduler"}


@pytest.mark.parametrize("name", mostly_long(RESUMED, DEFAULT))
def test_it_goes_on_as_if_nothing_had_happened(runs: Runs, name: str) -> None:
    source = RESUMED[name][0]
    before, after = runs.of(source), runs.of(name)
    assert runs.contents(name) == runs.contents(source)
    half = {"bf16", "fp16"} & {*TRAINED[source]}
    # Other optimizers and parallelisms place tensors otherwise in memory, and so round otherwise.
    assert after["after"] == pytest.approx(before["after"], abs=1e-3 if half else 1e-5)


@pytest.mark.parametrize("name", mostly_long(RESUMED, DEFAULT))
def test_the_model_computes_with_the_weights_that_were_loaded(runs: Runs, name: str) -> None:
    held = runs.of(name)["expected"]
    masters = {key.split("|")[0]: each for key, each in held.items() if key.endswith("|param")}
    for parameter, master in masters.items():
        weight = held[f"{parameter}|weight"]
        assert torch.equal(weight, master.to(weight.dtype)), parameter


@pytest.mark.parametrize(
    "name",  # tests/formats/test_megatron.py reads the others
    mostly_long(FOREIGN, ["distributed"]),
)
def test_checkpoints_of_megatron_load_as_they_are(
    workers: HostedGang, tmp_path: Path, name: str
) -> None:
    kind, world, division = FOREIGN[name]
    place = unpacked(f"megatron_{kind}", tmp_path / kind)
    again = tmp_path / "again"
    found = on_ranks(workers, world, "load", {**SMALL, **division}, str(place), str(again))
    before, after = contents(place), contents(again)
    assert_as_had(after, found[0])
    groups = before.pop("optimizer.param_groups"), after.pop("optimizer.param_groups")
    wanted = {key: each for key, each in before.items() if key.split(".")[0] in STATE}
    assert after == wanted
    for member, settings in groups[0].items():
        for key, value in settings.items():
            assert key == "is_expert_parallel" or groups[1][member][key] == value, (member, key)


@pytest.mark.long  # tests/adapters/test_deepspeed.py goes on without the framework, too
def test_one_process_goes_on_with_an_optimizer_of_torch(
    runs: Runs, workers: HostedGang, tmp_path: Path
) -> None:
    """And what it saves, Megatron-Core's optimizers go on from."""
    wanted = runs.of("bfloat16")
    places = str(runs.root / "bfloat16"), str(tmp_path / "plain")
    (found,) = on_ranks(workers, 1, "plain", LLAMA, *places)
    assert found["after"] == pytest.approx(wanted["after"], abs=1e-3)
    own = {"scheduler", "megatron.grad_scaler"}
    before = {k: v for k, v in contents(places[0]).items() if k not in own}
    after = contents(places[1])
    groups = after.pop("optimizer.param_groups"), before.pop("optimizer.param_groups")
    assert after == before
    assert {member: each["lr"] for member, each in groups[0].items()} == {
        member: each["lr"] for member, each in groups[1].items()
    }
    case = {"tp": 2, "bf16": True, "distributed": True, **LLAMA}
    later = f"{places[1]}-later"
    on_ranks(workers, 4, "load", case, later, str(tmp_path / "back"))
    wanted, back = contents(later), contents(tmp_path / "back")
    assert {k: v for k, v in back.items() if "groups" not in k} == {
        k: v for k, v in wanted.items() if "groups" not in k
    }


def test_the_scale_of_losses_is_restored(runs: Runs) -> None:
    runs.of("float16-stages")
    for name in ("float16", "float16-stages"):
        scale = sw.open(runs.root / name)["megatron.grad_scaler"]
        assert scale == {"scale": 256.0, "growth_tracker": 2, "hysteresis_tracker": 2}


def test_a_vocabulary_with_more_padding_is_filled(
    runs: Runs, workers: HostedGang, tmp_path: Path
) -> None:
    runs.of("distributed")
    before = sw.open(runs.root / "distributed")
    wider, narrow = tmp_path / "wider", tmp_path / "narrow"
    case: dict[str, Any] = {"tp": 4, "vocab": 72, "distributed": True}
    on_ranks(workers, 4, "load", case, str(runs.root / "distributed"), str(wider))
    after = sw.open(wider)
    name = "embedding.word_embeddings.weight"
    for key in (f"model.{name}", f"optimizer.{name}.exp_avg", f"optimizer.{name}.exp_avg_sq"):
        assert after[key].shape == (72, 24)
        assert torch.equal(after[key][:64], before[key][...])
        assert key.startswith("model.") or not after[key][64:].any()
    with pytest.raises(GangError, match=r"a specification can cut the padding of a vocabulary"):
        on_ranks(workers, 2, "load", {"tp": 2}, str(wider), str(narrow))
    cut = [
        f"*.word_embeddings.weight{of} -> *.word_embeddings.weight{of} [(v)[:60] h]"
        for of in ("", ".exp_avg", ".exp_avg_sq")
    ]
    spec = "\n".join([*cut, "* -> *"])
    on_ranks(workers, 2, "load", {"tp": 2}, str(wider), str(narrow), spec)
    assert torch.equal(sw.open(narrow)[f"model.{name}"][:60], before[f"model.{name}"][:60])


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory for snapshots, whose agent is ended afterwards."""
    directory = tmp_path / "shm"
    directory.mkdir()
    yield directory
    end_agents(directory)


@pytest.mark.long  # tests/faults/memory divides what is in memory in other ways
def test_snapshots_in_memory_are_restored_by_other_ranks(
    workers: HostedGang, tmp_path: Path, memory: Path
) -> None:
    place = str(tmp_path / "here")
    case = {"tp": 2, "distributed": True, "bf16": True, **LLAMA}
    on_ranks(workers, 4, "save_in_memory", case, place, str(memory))
    case = {"pp": 2, "bf16": True, **LLAMA}
    assert on_ranks(workers, 2, "recall", case, place, str(memory)) == ["memory"] * 2
    assert contents(f"{place}-recalled") == contents(place)


BUCKETED: dict[str, dict[str, Any]] = {
    "float32": {"tp": 2, "distributed": True, "bucket": 3000, "clip": 0.0},
    "bfloat16": {"pp": 2, "distributed": True, "bf16": True, "bucket": 3000, **LLAMA},
    "experts": {"ep": 2, "distributed": True, "bf16": True, **MOE},
}


@pytest.mark.parametrize(
    ("kind", "worlds"),
    mostly_long([("float32", (2,)), *((kind, (2, 4)) for kind in BUCKETED)], [("float32", (2,))]),
)
def test_buckets_of_the_distributed_optimizer_load_under_other_data_parallelism(
    workers: HostedGang, tmp_path: Path, kind: str, worlds: tuple[int, ...]
) -> None:
    """What Megatron-Core saved as `dp_reshardable`, in the same model parallelism."""
    case, place = BUCKETED[kind], str(tmp_path / "saved")
    before = on_ranks(workers, 4, "save_with_megatron", case, place, "dp_reshardable")
    for world in worlds:
        again = str(tmp_path / f"on-{world}")
        stepped = {**case, "stepped": world // 4}
        after = on_ranks(workers, world, "resume_of_megatron", stepped, place, again)
        wanted = before[0]["expected"]
        assert {*after[0]["expected"]} == {*wanted}
        for name, tensor in wanted.items():
            assert torch.equal(after[0]["expected"][name], tensor), name
        assert_as_had(contents(again), before[0])
        losses = [next(each["after"] for each in of if each["after"]) for of in (before, after)]
        assert losses[1] == pytest.approx(losses[0], abs=1e-5 if kind == "float32" else 1e-3)
    other = {**case, "tp": 1, "pp": 1, "ep": 1}
    with pytest.raises(GangError, match=r"saved as dp_reshardable.*, but this optimizer"):
        on_ranks(workers, 2, "resume_of_megatron", other, place, str(tmp_path / "other"))


@pytest.mark.parametrize(
    ("sharding", "divisions"),
    mostly_long(
        [
            ("fully_reshardable", ((4, 2),)),
            *((sharding, ((1, 1), (4, 2))) for sharding in ("fully_reshardable", "")),
        ],
        [("fully_reshardable", ((4, 2),))],
    ),
)
def test_chained_optimizers_of_experts_continue(
    workers: HostedGang, tmp_path: Path, sharding: str, divisions: tuple[tuple[int, int], ...]
) -> None:
    """With expert parallelism, Megatron-Core writes the param groups as `{0: …, 1: …}`."""
    case = {"bf16": True, "distributed": bool(sharding), **MOE}
    place = str(tmp_path / "saved")
    before = on_ranks(workers, 2, "save_with_megatron", {**case, "ep": 2}, place, sharding)
    groups = sw.open(place)["optimizer.param_groups"]
    kinds = {(g["value"]["is_expert_parallel"], g["value"]["weight_decay"]) for g in groups}
    assert kinds == {(False, 0.01), (False, 0.0), (True, 0.01)}
    for world, ep in divisions:
        again, other = str(tmp_path / f"on-{world}"), {**case, "ep": ep, "stepped": ep - 1}
        other["distributed"] = not sharding
        after = on_ranks(workers, world, "resume_of_megatron", other, place, again)
        for name, tensor in before[0]["expected"].items():
            assert torch.equal(after[0]["expected"][name], tensor), name
        lr = groups[0]["value"]["lr"]
        for group in sw.open(again)["optimizer.param_groups"]:
            assert (group["value"]["weight_decay"], group["value"]["lr"]) in {(0.01, lr), (0.0, lr)}
            decays = [
                not name.endswith(("norm.weight", "norm_weight")) for name in group["members"]
            ]
            assert {*decays} == {group["value"]["weight_decay"] > 0}
        losses = [next(each["after"] for each in of if each["after"]) for of in (before, after)]
        assert losses[1] == pytest.approx(losses[0], abs=1e-3)


@pytest.mark.parametrize("bf16", mostly_long([True, False], [True]))
def test_masters_that_contradict_their_weights_are_not_read(
    workers: HostedGang, tmp_path: Path, bf16: bool
) -> None:
    """Megatron-Core 0.16.1 confuses masters if it pads its buckets; its weights are right."""
    case = {"distributed": True, "bucket": 2000, "hidden": 20, "heads": 2, **LLAMA}
    case |= {"bf16": bf16}
    place = str(tmp_path / "saved")
    before = on_ranks(workers, 2, "save_with_megatron", case, place, "fully_reshardable")
    found = sw.open(place)
    assert not [name for name in found if name.startswith(("module.", "optimizer."))]
    (line,) = [line for line in found.left_out if line.startswith("optimizer.*: the master")]
    assert "decoder.layers.0.mlp.linear_fc2.weight, " in line
    weights = {
        name.partition("|")[0]: tensor
        for name, tensor in before[0]["expected"].items()
        if name.endswith("|weight")
    }
    names = {new: old for old, new in RENAMED.items()}
    target: dict[str, dict[str, torch.Tensor]] = {"model": {}}
    for name in found:
        if name.startswith("model."):
            target["model"][name.removeprefix("model.")] = torch.zeros_like(found[name][...])
    sw.load(place, target, only=["model.*"])
    sw.export(place, tmp_path / "published", only=["model.*"])
    published = sw.open(tmp_path / "published")
    for key, tensor in target["model"].items():
        own = next((key.replace(new, old) for new, old in names.items() if new in key), key)
        assert torch.equal(tensor, weights.pop(own))
        assert torch.equal(published[f"model.{key}"][...], tensor)
    assert not weights
    with pytest.raises(GangError, match="left out: the master weights of"):
        on_ranks(workers, 1, "resume_of_megatron", case, place, str(tmp_path / "again"))


@pytest.mark.long  # the same without the defect
def test_masters_of_padded_buckets_are_compared_wholly(workers: HostedGang, tmp_path: Path) -> None:
    """Without several buckets, the same model is read with its masters and moments."""
    case = {"distributed": True, "hidden": 20, "heads": 2, "bf16": True, **LLAMA}
    place = str(tmp_path / "saved")
    before = on_ranks(workers, 2, "save_with_megatron", case, place, "fully_reshardable")
    after = on_ranks(workers, 1, "resume_of_megatron", case, place, str(tmp_path / "again"))
    for name, tensor in before[0]["expected"].items():
        assert torch.equal(after[0]["expected"][name], tensor), name
