"""Every pattern of the language, against arrays that numpy cuts."""

from __future__ import annotations

import numpy as np
import pytest

import shardwise as sw
from tests.formats.language.rankfiles import Array, numbered, opened, problems, read, same

TP2 = {"tp": 2}


def on_tp(name: str, shards: list[Array]) -> dict[tuple[int, ...], dict[str, Array]]:
    return {(rank,): {name: shard} for rank, shard in enumerate(shards)}


def test_columns_and_rows() -> None:
    whole = numbered(4, 6)
    same(read("ranks tp\nw -> w [(tp f) h]", TP2, on_tp("w", np.split(whole, 2)))["w"], whole)
    columns = [part.copy() for part in np.split(whole, 2, axis=1)]
    same(read("ranks tp\nw -> w [h (tp f)]", TP2, on_tp("w", columns))["w"], whole)


def test_arrays_of_any_strides() -> None:
    whole = numbered(4, 6)
    columns = [np.asfortranarray(part) for part in np.split(whole, 2, axis=1)]
    same(read("ranks tp\nw -> w [h (tp f)]", TP2, on_tp("w", columns))["w"], whole)


def test_two_axes_at_once() -> None:
    whole = numbered(4, 6)
    ranks = {
        (i, j): {"w": whole[2 * i : 2 * i + 2, 3 * j : 3 * j + 3].copy()}
        for i in range(2)
        for j in range(2)
    }
    same(read("ranks tp ep\nw -> w [(tp a) (ep b)]", {"tp": 2, "ep": 2}, ranks)["w"], whole)


def test_replicas_are_told() -> None:
    whole = numbered(4)
    with opened("ranks tp\nln -> ln [h]", TP2, on_tp("ln", [whole, whole])) as found:
        assert len(found.layout.pieces) == 1
        assert found.layout.replicas.file.tolist() == [1]
        same(found["ln"][...], whole)


def test_unequal_shards() -> None:
    whole = numbered(7, 2)
    shards = np.split(whole, [3, 6])
    same(read("ranks tp\nw -> w [(tp ~f) h]", {"tp": 3}, on_tp("w", shards))["w"], whole)
    fused = np.concatenate([whole, whole + 100])
    parts = [np.concatenate([a, a + 100]) for a in shards]
    text = "ranks tp\nw -> w [((gate + up) tp ~f) h]"
    same(read(text, {"tp": 3}, on_tp("w", parts))["w"], fused)


def test_swiglu_is_gate_and_up_of_all() -> None:
    gate, up = numbered(4, 3), numbered(4, 3) + 100
    shards = [
        np.concatenate([a, b]) for a, b in zip(np.split(gate, 2), np.split(up, 2), strict=True)
    ]
    got = read("ranks tp\nw -> w [((gate + up) tp f) h]", TP2, on_tp("w", shards))
    same(got["w"], np.concatenate([gate, up]))
    apart = "ranks tp\nw [((gate + up) f) h] -> gate [(gate tp f) h], up [(up tp f) h]"
    got = read(apart, TP2, on_tp("w", shards))
    same(got["gate"], gate)
    same(got["up"], up)


def test_queries_keys_and_values_by_group() -> None:
    groups, r, d, h = 4, 3, 2, 5
    q, k, v = (numbered(groups, n, d, h) + 1000 * n for n in (r, 1, 1))
    v = v + 500
    fused = np.concatenate([q, k, v], axis=1).reshape(-1, h)
    text = """
        ranks tp
        let r
        qkv [(tp g (q + k + v) d) h] -> wq [(tp g q d) h],
                                        wk [(tp g k d) h],
                                        wv [(tp g v d) h]
            where q = r, d = 2
    """
    got = read(text, TP2, on_tp("qkv", np.split(fused, 2)), r=r)
    same(got["wq"], q.reshape(-1, h))
    same(got["wk"], k.reshape(-1, h))
    same(got["wv"], v.reshape(-1, h))


def test_layers_of_pipeline_stages() -> None:
    layers = [numbered(2, 2) + 10 * i for i in range(5)]
    stages = [layers[:3], layers[3:]]
    ranks = {(s,): {f"l.{i}.w": w for i, w in enumerate(own)} for s, own in enumerate(stages)}
    got = read("ranks pp\nl.{i}.w -> layers.{pp ~i}.w", {"pp": 2}, ranks)
    assert sorted(got) == [f"layers.{i}.w" for i in range(5)]
    for i, layer in enumerate(layers):
        same(got[f"layers.{i}.w"], layer)
    even = {rank: arrays for rank, arrays in ranks.items() if rank == (0,)} | {
        (1,): {f"l.{i}.w": layers[i] + 1 for i in range(3)}
    }
    for text in ("{pp i}", "{i + pp*3}", "{pp*|i| + i}"):
        spec = "ranks pp\nl.{i}.w -> layers." + text + ".w [a b]"
        same(read(spec, {"pp": 2}, even)["layers.4.w"], layers[1] + 1)


def test_numbers_with_gaps_are_refused() -> None:
    ranks = {(0,): {"l.0.w": numbered(2), "l.1.w": numbered(2)}, (1,): {"l.0.w": numbered(2)}}
    ranks[(2,)] = ranks[(0,)]
    text = "ranks pp\nl.{i}.w -> layers.{pp i}.w"
    (problem,) = problems(text, {"pp": 3}, ranks)
    assert "layers.…: numbers go up to 5, without 3" in problem


def test_experts_listed_and_stacked() -> None:
    whole = numbered(4, 2, 3)
    listed = {(r,): {f"e.{i}.w": whole[2 * r + i] for i in range(2)} for r in range(2)}
    same(read("ranks ep\ne.{e}.w -> w [(ep e) f h]", {"ep": 2}, listed)["w"], whole)
    stacked = {(r,): {"w": whole[2 * r : 2 * r + 2].copy()} for r in range(2)}
    got = read("ranks ep\nw [e f h] -> e.{ep e}.w [f h]", {"ep": 2}, stacked)
    for i in range(4):
        same(got[f"e.{i}.w"], whole[i])
    far = {(r,): {f"e.{i}.w": whole[2 * i + r] for i in range(2)} for r in range(2)}
    same(read("ranks ep\ne.{e}.w -> w [(e ep) f h]", {"ep": 2}, far)["w"], whole)


def test_experts_and_tensor_parallel_at_once() -> None:
    experts = numbered(4, 4, 3)
    fused = experts.reshape(4 * 4, 3)
    ranks = {
        (t, e): {"w": experts[2 * e : 2 * e + 2, 2 * t : 2 * t + 2].reshape(-1, 3)}
        for t in range(2)
        for e in range(2)
    }
    text = "ranks tp ep\nw -> w [(ep e tp f) h] where f = 2"
    same(read(text, {"tp": 2, "ep": 2}, ranks)["w"], fused)


def test_padding_is_left_out() -> None:
    whole = numbered(5, 2)
    padded = np.concatenate([whole, np.zeros((3, 2), np.int32)])
    shards = on_tp("e", np.split(padded, 2))
    text = "ranks tp\nlet vocab = 5\ne -> e [(tp v)[:vocab] h]"
    same(read(text, TP2, shards)["e"], whole)
    open_ = "ranks tp\ne -> e [(tp v)[:vocab] h]\nlet vocab"
    same(read(open_, TP2, shards, vocab=5)["e"], whole)


def test_transposition() -> None:
    whole = numbered(4, 6)
    shards = on_tp("w", [part.T.copy() for part in np.split(whole, 2, axis=1)])
    same(read("ranks tp\nw [f h] -> w [h (tp f)]", TP2, shards)["w"], whole)


def test_gpt2_wants_all_of_q_before_k_and_transposed() -> None:
    heads, d, h = 4, 2, 3
    qkv = numbered(heads, 3, d, h)
    shards = on_tp("qkv", np.split(qkv.reshape(-1, h), 2))
    text = "ranks tp\nqkv [(tp n (q + k + v) d) h] -> c [h ((q + k + v) tp n d)] where d = 2"
    same(read(text, TP2, shards)["c"], qkv.transpose(3, 1, 0, 2).reshape(h, -1))


def test_ties_and_skips() -> None:
    ranks = {(): {"embed": numbered(2, 2), "rng": numbered(3)}}
    text = 'head.weight = embed.weight\nembed -> embed.weight\nskip r* "x y"'
    with opened(text, {}, ranks) as found:
        assert found.left_out == ("rng: skipped by specification:3",)
        same(found["head.weight"][...], numbered(2, 2))


def test_optimizer_states_follow_their_parameters() -> None:
    fused = numbered(4, 3)
    ranks = {
        (t,): {
            "l.0.w": fused[2 * t : 2 * t + 2],
            "optimizer.l.0.w.exp_avg": fused[2 * t : 2 * t + 2] + 50,
            "optimizer.l.0.w.step": numbered(1).reshape(()),
        }
        for t in range(2)
    }
    text = """
        ranks tp
        l.{i}.w [(a + b) h] -> model.{i}.a [(a tp) h], model.{i}.b [(b tp) h]
        optimizer.{p*}.step like {p*}, model.{q*} -> optimizer.{q}.step []
        optimizer.*.{state} like *, model.* -> optimizer.*.{state}
    """
    got = read(text, TP2, ranks)
    same(got["model.0.b"], fused[1::2])
    same(got["optimizer.0.a.exp_avg"], fused[::2] + 50)
    same(got["optimizer.0.b.step"], numbered(1).reshape(()))


PARTS = """
    let n = 2
    q [(g q d) h] -> w [(g (q + k + v) d) h] where g = 2, q = n
    k [(g k d) h] -> w [(g (q + k + v) d) h] where g = 2, q = n
    v [(g v d) h] -> w [(g (q + k + v) d) h] where g = 2, q = n
"""


def arrays_of_parts() -> dict[str, Array]:
    return {"q": numbered(8, 3), "k": numbered(4, 3) + 50, "v": numbered(4, 3) + 90}


def test_one_tensor_from_several_arrays() -> None:
    parts = arrays_of_parts()
    q, k, v = (parts[name].reshape(2, -1, 2, 3) for name in "qkv")
    fused = np.concatenate([q, k, v], 1).reshape(-1, 3)
    same(read(PARTS, {}, {(): parts})["w"], fused)
    back = """
        w [(g (q + k + v) d) h] -> q [(g q d) h], k [(g k d) h], v [(g v d) h] where g = 2, q = 2
    """
    found = read(back, {}, {(): {"w": fused}})
    for name, array in parts.items():
        same(found[name], array)


@pytest.mark.parametrize("lacking", ["q", "k", "v"])
def test_a_part_that_no_array_has(lacking: str) -> None:
    parts = arrays_of_parts()
    del parts[lacking]
    with pytest.raises(sw.MismatchError, match=r"w: \[16, 3\]: \d+ of its 48 elements are there"):
        read(PARTS, {}, {(): parts})


def test_parts_of_other_sizes() -> None:
    parts = arrays_of_parts()
    parts["k"] = numbered(2, 3)
    with pytest.raises(sw.MismatchError, match=r"w: its arrays disagree on its shape"):
        read(PARTS, {}, {(): parts})


def test_a_part_that_two_arrays_have() -> None:
    text = "*.g [(g f)] -> w [((g + u) f)]\n*.u [(u f)] -> w [((g + u) f)]"
    arrays = {"a.g": numbered(2), "a.u": numbered(2) + 5, "b.u": numbered(2) + 5}
    same(read(text, {}, {(): arrays})["w"], np.array([0, 1, 5, 6], np.int32))
    text = "g [(g f)] -> w [((g + u) f)]\nw -> w"
    with pytest.raises(sw.MismatchError, match="its arrays overlap"):
        read(text, {}, {(): {"g": numbered(2), "w": numbered(4)}})


def test_parts_that_alternate() -> None:
    alternating = numbered(2, 3, 8)
    text = "w [e h (f (g + u))] -> v [e ((g + u) f) h]"
    turned = np.concatenate([alternating[..., ::2], alternating[..., 1::2]], 2).transpose(0, 2, 1)
    same(read(text, {}, {(): {"w": alternating}})["v"], turned.copy())
    back = "v [e ((g + u) f) h] -> w [e h (f (g + u))]"
    same(read(back, {}, {(): {"v": turned.copy()}})["w"], alternating)


def test_rules_copied_twice() -> None:
    text = """
        w -> layer.w [h]
        l.{i}.{p*} like {p*}, layer.* -> model.l.{i + 0}.*
        m.{k}.{p*} like {p*}, layer.* -> model.l.{i_last + k}.*
        optimizer.{p*}.step like {p*}, model.* -> optimizer.*.step []
        optimizer.{p*}.{state} like {p*}, model.* -> optimizer.*.{state}
        let i_last = 2
    """
    names = {"l.0.w": 0, "l.1.w": 1, "m.0.w": 2}
    arrays = {name: numbered(3) + number for name, number in names.items()}
    arrays |= {f"optimizer.{name}.m": -array for name, array in arrays.items()}
    arrays |= {f"optimizer.{name}.step": np.array(number) for name, number in names.items()}
    found = read(text, {}, {(): arrays})
    for number in names.values():
        same(found[f"model.l.{number}.w"], numbered(3) + number)
        same(found[f"optimizer.l.{number}.w.m"], -(numbered(3) + number))
        same(found[f"optimizer.l.{number}.w.step"], np.array(number))


def test_a_scalar_of_an_array_that_becomes_several_tensors() -> None:
    text = """
        w [e h] -> model.{e} [h]
        v -> model.v [h]
        optimizer.{p*}.step like {p*}, model.* -> optimizer.*.step []
    """
    arrays = {"w": numbered(2, 3), "optimizer.w.step": numbered(1).reshape(())}
    with pytest.raises(sw.MismatchError, match=r"optimizer.w.step: no rule matches it"):
        read(text, {}, {(): arrays})


def test_conditions() -> None:
    text = """
        let last = 2, both = 0
        l.{i} -> twice.{i}, again.{i} on both = 1
        l.{i} -> end on i = last
        l.{i} -> start.{i}
    """
    arrays = {f"l.{i}": numbered(2) + i for i in range(3)}
    assert [*read(text, {}, {(): arrays})] == ["end", "start.0", "start.1"]
    assert len(read(text, {}, {(): arrays}, both=1)) == 6
    assert "end" not in read(text, {}, {(): arrays}, last=7)


def test_rules_of_some_ranks_only() -> None:
    ranks = {(0,): {"w": numbered(2)}, (1,): {"w": numbered(2) + 5}}
    text = "ranks pp\nw -> first on pp = 0\nw -> last on pp = |pp| - 1"
    same(read(text, {"pp": 2}, ranks)["last"], numbered(2) + 5)


def test_dimensions_that_are_not_named() -> None:
    whole = numbered(4, 2, 3)
    same(read("ranks tp\n* -> x.* [(tp f) ...]", TP2, on_tp("w", np.split(whole, 2)))["x.w"], whole)


@pytest.mark.parametrize("text", ["w -> w [(tp f) h]", "w -> w"])
def test_empty_tensors(text: str) -> None:
    whole = np.zeros((0, 3), np.int32)
    same(read("ranks tp\n" + text, TP2, on_tp("w", [whole, whole]))["w"], whole)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("w -> w [(tp a b) h]", "`(a b)` = 4 does not determine the sizes of a, b: give them with"),
        ("w -> w [(tp f) h] where f = 3", "`f` cannot be 4 with f = 3: its size is 3"),
        (
            "w -> w [(tp f)[:n] h]\nlet n = 9",
            "dimension 0 is cut at 9, but has 8 elements",
        ),
        ("w -> w [(tp f)[:n] h]\nlet n", "n is declared without a value: pass n=… to sw.spec"),
        ("w -> w.{tp - 1}", "{(tp - 1)} is -1, with tp = 0"),
        ("w [(n + _) h] -> w [n h]", "does not determine the sizes of n, _"),
        ("w -> w on tp = 0", "w: no rule matches it; `skip` what is not wanted"),
        ("w -> w\nx = y", "y: no tensor has this name, so nothing is tied to it"),
    ],
)
def test_what_does_not_fit(text: str, problem: str) -> None:
    ranks = {(t, 0): {"w": numbered(4, 2) + 8 * t} for t in range(2)}
    (found,) = problems("ranks tp ep\n" + text, {"tp": 2, "ep": 1}, ranks)
    assert problem in found


def test_absurd_numbers_are_refused() -> None:
    far = {(0,): {"w.999999999.999999999.999999999": numbered(2)}}
    text = "ranks tp\nw.{i}.{j}.{k} -> w [i j k h]"
    assert "would have more than" in problems(text, {"tp": 1}, far)[0]


def test_all_that_is_wrong_is_told() -> None:
    ranks = {
        (t,): {
            "odd": numbered(5, 2),
            "cut": numbered(3, 2),
            "flat": numbered(3),
            "other": numbered(1),
            "kind": numbered(2).astype(np.int32 if t else np.int64),
        }
        for t in range(2)
    }
    del ranks[(1,)]["cut"]
    text = """
        ranks tp
        odd -> odd [(tp (gate + up) f) h]
        cut -> cut [(tp f) h]
        flat -> flat [a b]
        kind -> kind [(tp f)]
    """
    assert problems(text, TP2, ranks) == [
        "odd (specification:3): [5, 2]: `((gate + up) f)` cannot be 5 with gate = 1, up = 1: "
        "it does not divide",
        "flat (specification:5): [3]: [a b] has 2 dimensions on a rank; the array has 1: "
        "correct the dimensions, or use `...` for the others",
        "other: no rule matches it; `skip` what is not wanted",
        "kind: some of its arrays are int32, some int64",
        "cut: [6, 2]: 6 of its 12 elements are there, from cut",
    ]


def test_names_that_are_tied_and_stored_are_copies() -> None:
    one, other = numbered(2, 2), numbered(2, 2) + 1
    ranks = {(0,): {"embed": one}, (1,): {"head": other, "norm": numbered(3)}}
    text = "ranks pp\nembed -> embed\nhead -> head\nnorm -> norm\nhead = embed"
    with opened(text, {"pp": 2}, ranks) as found:
        layout = found.layout
        assert {entry.name: entry.same_as for entry in layout.tensors} == {
            "embed": None,
            "head": "embed",
            "norm": None,
        }
        same(found["head"][...], one)
        same(found["norm"][...], numbered(3))
        assert layout.replicas.file.tolist() == [1]
        assert layout.replicas.tensor.tolist() == [0]


def test_a_tie_may_give_way_to_what_is_stored() -> None:
    text = "ranks pp\nembed -> embed\nhead -> head\nhead = embed unless stored"
    ranks = {(0,): {"embed": numbered(2, 2)}, (1,): {"head": numbered(2, 2) + 1}}
    with opened(text, {"pp": 2}, ranks) as found:
        assert not len(found.layout.replicas)
        same(found["head"][...], numbered(2, 2) + 1)
    same(read(text, {"pp": 1}, {(0,): {"embed": numbered(2, 2)}})["head"], numbered(2, 2))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a -> a\nb -> b\na = b\nb = a", "a: it is tied to itself"),
        ("a -> a\nb -> b\nc -> c\na = b\na = c", "a: it is tied to c and to b"),
        ("a -> a\nb -> b [y x]\nc -> c\nb = a", "b: it is int32 [3, 2], but is tied to a, which"),
        ("a -> a\nb -> b\nc -> c\nb = d", "d: no tensor has this name, so nothing is tied to it"),
    ],
)
def test_ties_that_make_no_sense_are_refused(text: str, problem: str) -> None:
    arrays = {name: numbered(2, 3) for name in "abc"}
    if "[y x]" in text:
        text = text.replace("b -> b [y x]", "b [x y] -> b [y x]")
    found = problems(text, {}, {(): arrays})
    assert any(line.startswith(problem) for line in found), found
