"""Legacy checkpoints of Megatron-LM from a small writer: old names, directories, what is wrong."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw

HIDDEN, INNER, VOCAB, LAYERS = 4, 6, 8, 2


def whole(layer: int) -> dict[str, torch.Tensor]:
    """Parameters of a layer, by the names that Megatron-LM had before Megatron-Core."""
    torch.manual_seed(layer)
    return {
        "input_layernorm.weight": torch.randn(HIDDEN),
        "self_attention.query_key_value.weight": torch.randn(3 * HIDDEN, HIDDEN),
        "self_attention.query_key_value.bias": torch.randn(3 * HIDDEN),
        "self_attention.dense.weight": torch.randn(HIDDEN, HIDDEN),
        "self_attention.dense.bias": torch.randn(HIDDEN),
        "mlp.dense_h_to_4h.weight": torch.randn(INNER, HIDDEN),
        "mlp.dense_4h_to_h.weight": torch.randn(HIDDEN, INNER),
    }


def of_rank(tp: int, pp: int, tps: int) -> dict[str, Any]:
    """The nested model of a rank that has one layer."""
    encoder = {}
    for name, tensor in whole(pp).items():
        rows = name.endswith(("query_key_value.weight", "query_key_value.bias", "h_to_4h.weight"))
        columns = name.endswith(("dense.weight", "4h_to_h.weight"))
        part = tensor.chunk(tps, 1 if columns else 0)[tp] if rows or columns else tensor
        encoder[f"layers.0.{name}"] = part.clone()
    words = torch.arange(float(VOCAB * HIDDEN)).view(VOCAB, HIDDEN).chunk(tps)[tp].clone()
    first = {"embedding": {"word_embeddings": {"weight": words}}} if pp == 0 else {}
    return {"language_model": {**first, "encoder": encoder}}


def write(root: Path, tps: int = 2, pps: int = 2, **beside: Any) -> Path:
    """A checkpoint in two files a rank, as once; its optimizer has groups without marks."""
    for tp in range(tps):
        for pp in range(pps):
            folder = root / "iter_0000007" / f"mp_rank_{tp:02d}_{pp:03d}"
            folder.mkdir(parents=True)
            model = of_rank(tp, pp, tps)
            sizes = {"tensor_model_parallel_size": tps, "pipeline_model_parallel_size": pps}
            state = {"args": Namespace(**sizes), "iteration": 7, "model": model}
            torch.save({**state, "checkpoint_version": 3.0, **beside}, folder / "model_rng.pt")
            torch.save({"optimizer": optimizer(model)}, folder / "optim.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    return root


def optimizer(model: dict[str, Any]) -> dict[str, Any]:
    parts = model["language_model"]
    words = [parts["embedding"]["word_embeddings"]["weight"]] if "embedding" in parts else []
    tensors = [*words, *parts["encoder"].values()]
    order = [i for i, t in enumerate(tensors) if t.ndim > 1] + [
        i for i, t in enumerate(tensors) if t.ndim == 1
    ]
    decay = sum(tensor.ndim > 1 for tensor in tensors)
    state = {
        number: {"step": 3, "exp_avg": tensors[i] + 1, "exp_avg_sq": tensors[i] + 2}
        for number, i in enumerate(order)
    }
    numbers = list(range(len(order)))
    groups = [
        {"params": numbers[:decay], "lr": 0.1, "weight_decay": 0.01},
        {"params": numbers[decay:], "lr": 0.1, "weight_decay": 0.0},
    ]
    return {"optimizer": {"state": state, "param_groups": groups}}


def test_names_of_before_are_kept(tmp_path: Path) -> None:
    found = sw.open(write(tmp_path))
    read = {name: tensor[...] for name, tensor in found.tensors().items()}
    groups = found["optimizer.param_groups"]
    prefix = "language_model.encoder.layers."
    for layer in range(LAYERS):
        for name, tensor in whole(layer).items():
            full = f"{prefix}{layer}.{name}"
            assert torch.equal(read[f"model.{full}"], tensor)
            assert torch.equal(read[f"optimizer.{full}.exp_avg"], tensor + 1)
            assert read[f"optimizer.{full}.step"] == 3
            decays = full in groups[0]["members"]
            assert decays == (tensor.ndim > 1) != (full in groups[1]["members"])
    words = read["model.language_model.embedding.word_embeddings.weight"]
    assert torch.equal(words.flatten(), torch.arange(float(VOCAB * HIDDEN)))


def test_old_names_become_those_of_gpt2(tmp_path: Path) -> None:
    spec = sw.spec("megatron_gpt2", vocab=VOCAB - 1, heads=2)
    found = sw.open(write(tmp_path), spec=spec)
    read = {name: tensor[...] for name, tensor in found.tensors().items()}
    assert read["model.transformer.wte.weight"].shape == (VOCAB - 1, HIDDEN)
    fused = whole(1)["self_attention.query_key_value.weight"].view(2, 3, 2, HIDDEN)
    wanted = fused.permute(3, 1, 0, 2).reshape(HIDDEN, -1)
    assert torch.equal(read["model.transformer.h.1.attn.c_attn.weight"], wanted)
    up = whole(0)["mlp.dense_h_to_4h.weight"].T
    assert torch.equal(read["model.transformer.h.0.mlp.c_fc.weight"], up)
    assert torch.equal(read["optimizer.transformer.h.0.mlp.c_fc.weight.exp_avg"], up + 1)


def test_a_folder_of_an_iteration_is_a_checkpoint_too(tmp_path: Path) -> None:
    folder = write(tmp_path) / "iter_0000007"
    assert sw.open(folder)["iteration"] == 7
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert sw.open(tmp_path)["iteration"] == 7


def test_the_latest_is_not_guessed(tmp_path: Path) -> None:
    write(tmp_path)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("8")
    with pytest.raises(sw.FormatError, match="says '8', and iter_0000008 is missing"):
        sw.open(tmp_path)
    tracker.unlink()
    (tmp_path / "iter_0000007").rename(tmp_path / "iter_0000005")
    (tmp_path / "iter_0000006" / "mp_rank_00").mkdir(parents=True)
    torch.save({}, tmp_path / "iter_0000006" / "mp_rank_00" / "model_optim_rng.pt")
    with pytest.raises(
        sw.FormatError, match="so that the latest of iter_0000005, iter_0000006 is unknown"
    ):
        sw.open(tmp_path)


def lost(place: Path, *names: str) -> None:
    """Remove files, and see that they are named as missing."""
    for name in names:
        (place / "iter_0000007" / name).unlink()
    listed = ", ".join(f"iter_0000007/{name}" for name in names)
    with pytest.raises(sw.FormatError, match=f"{len(names)} (is|are) missing: {listed}. Copy"):
        sw.open(place)


@pytest.mark.parametrize("rank", ["mp_rank_01_001", "mp_rank_00_000"])
def test_a_missing_rank_is_said(rank: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "iter_0000007" / rank / "optim.pt").unlink()
    lost(tmp_path, f"{rank}/model_rng.pt")


def test_missing_ranks_that_are_last_are_said(tmp_path: Path) -> None:
    write(tmp_path)
    for tp in range(2):
        (tmp_path / "iter_0000007" / f"mp_rank_{tp:02d}_001" / "optim.pt").unlink()
    lost(tmp_path, *(f"mp_rank_{tp:02d}_001/model_rng.pt" for tp in range(2)))


@pytest.mark.parametrize("name", ["model_rng.pt", "optim.pt"])
def test_a_missing_file_of_a_rank_is_said(name: str, tmp_path: Path) -> None:
    write(tmp_path)
    lost(tmp_path, f"mp_rank_01_000/{name}")


def test_buffers_that_are_missing_are_said(tmp_path: Path) -> None:
    """Of all ranks, and of one."""
    write(tmp_path, pps=1)
    folders = [tmp_path / "iter_0000007" / f"mp_rank_{tp:02d}_000" for tp in range(2)]
    groups = [{"lr": 0.1, "wd_mult": 1.0}, {"lr": 0.1, "wd_mult": 0.0}]
    for folder in folders:
        torch.save({"optimizer": {"optimizer": {"param_groups": groups}}}, folder / "optim.pt")
    names = [f"{folder.name}/distrib_optim.pt" for folder in folders]
    with pytest.raises(sw.FormatError, match=f"2 are missing: .*{names[0]}, .*{names[1]}. Copy"):
        sw.open(tmp_path)
    torch.save({}, folders[0] / "distrib_optim.pt")
    with pytest.raises(sw.FormatError, match=f"1 is missing: .*{names[1]}. Copy"):
        sw.open(tmp_path)


def test_directories_that_changed_names_are_told(tmp_path: Path) -> None:
    folder = write(tmp_path) / "iter_0000007"
    for rank, path in enumerate(sorted(folder.glob("*/model_rng.pt"))):
        held = torch.load(path, weights_only=False)
        held["args"].rank = 2 * rank
        torch.save(held, path)
    assert "model.language_model.embedding.word_embeddings.weight" in sw.open(tmp_path)
    (folder / "mp_rank_00_000").rename(folder / "other")
    (folder / "mp_rank_01_000").rename(folder / "mp_rank_00_000")
    (folder / "other").rename(folder / "mp_rank_01_000")
    with pytest.raises(sw.FormatError, match=r"were renamed: .*_00_000 was written by rank 4"):
        sw.open(tmp_path)


def test_the_directory_of_a_rank_is_no_checkpoint(tmp_path: Path) -> None:
    folder = write(tmp_path) / "iter_0000007"
    with pytest.raises(
        sw.CheckpointNotFoundError, match=f"the directory of one rank: open {folder}, which has all"
    ):
        sw.open(folder / "mp_rank_00_000")


def test_a_note_of_the_latest_alone_is_told(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("8")
    with pytest.raises(sw.FormatError, match="says '8', and iter_0000008 is missing: copy it"):
        sw.open(tmp_path)


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ({"checkpoint_version": 1.0}, "checkpoint version 1.0 orders"),
        (
            {"args": {"tensor_model_parallel_size": 1}},
            "was 1, but there are directories of 2 ranks",
        ),
        ({"args": {"tensor_model_parallel_size": 4}}, "4 are missing: .*/mp_rank_02_000/model_rng"),
        ({"args": {"tensor_model_parallel_size": 2**40}}, "more than 1048576 files"),
        ({"model": [1]}, "model: expected a dict, found list"),
        ({"model1": {}, "model": {}, "model3": {}}, "a chunk of the model is missing"),
    ],
)
def test_what_contradicts_itself_is_refused(
    tmp_path: Path, beside: dict[str, Any], message: str
) -> None:
    with pytest.raises(sw.FormatError, match=message):
        sw.open(write(tmp_path, **beside))


def test_unknown_parameters_are_listed(tmp_path: Path) -> None:
    model = {"language_model": {"encoder": {"layers.0.mixer.weight": torch.ones(2)}}}
    with pytest.raises(sw.MismatchError) as caught:
        sw.open(write(tmp_path, pps=1, model=model))
    assert any("layers.0.mixer.weight: no rule" in problem for problem in caught.value.problems)


def test_an_optimizer_of_other_parameters_is_left_out_as_a_whole(tmp_path: Path) -> None:
    path = write(tmp_path) / "iter_0000007" / "mp_rank_01_001" / "optim.pt"
    groups = [{"params": [0, 1], "lr": 0.1}]
    torch.save({"optimizer": {"optimizer": {"state": {}, "param_groups": groups}}}, path)
    found = sw.open(tmp_path)
    assert any("does not name its parameters" in line for line in found.left_out)
    assert not [name for name in found if name.startswith("optimizer.")]


def test_buffers_of_another_size_are_refused(tmp_path: Path) -> None:
    write(tmp_path, pps=1)
    for tp in range(2):
        folder = tmp_path / "iter_0000007" / f"mp_rank_{tp:02d}_000"
        groups = [{"lr": 0.1, "wd_mult": 1.0}, {"lr": 0.1, "wd_mult": 0.0}]
        torch.save({"optimizer": {"optimizer": {"param_groups": groups}}}, folder / "optim.pt")
        buffer = {key: torch.zeros(1000) for key in ("param", "exp_avg", "exp_avg_sq")}
        state = {"buckets_coalesced": True, 0: {(torch.float32, torch.float32): buffer}}
        torch.save(state, folder / "distrib_optim.pt")
    with pytest.raises(sw.FormatError, match="has 1000 elements, which do not match its 8"):
        sw.open(tmp_path)
