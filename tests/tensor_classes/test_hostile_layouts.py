"""Files that describe sparse, jagged or quantized tensors wrongly are refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import shardwise as sw
from shardwise.kernel.state.plain_values import decode, encode
from tests.tensor_classes.layouts import MAKERS, contents

pytestmark = pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support")


def described(kind: str) -> dict[str, Any]:
    encoded: Any = encode(MAKERS[kind](1), "x")
    return encoded


@pytest.mark.parametrize("kind", MAKERS)
def test_a_value_that_has_its_bytes_inside_comes_back(kind: str) -> None:
    assert contents(decode(described(kind), "x")) == contents(MAKERS[kind](1))


@pytest.mark.parametrize("kind", MAKERS)
def test_each_component_must_be_there_and_be_a_tensor(kind: str) -> None:
    for key in described(kind)["tensors"]:
        if key == "lengths":
            continue  # without lengths, it is another tensor
        for wrong in (None, 3, [1, 2], {"a": 1}):
            encoded = described(kind)
            encoded["tensors"][key] = wrong
            with pytest.raises(sw.StateError, match=r"^x"):
                decode(encoded, "x")
        encoded = described(kind)
        del encoded["tensors"][key]
        with pytest.raises(sw.StateError, match=r"^x"):
            decode(encoded, "x")


@pytest.mark.parametrize("kind", MAKERS)
def test_each_part_of_the_context_is_checked(kind: str) -> None:
    fine = described(kind)
    for key in fine["context"]:
        for wrong in ("text", -7, 10**18, [], 1.5):
            if key == "scale" and type(wrong) is float:
                continue
            if (key, wrong) in [("zero_point", -7), ("max_seqlen", 10**18)]:
                continue
            if wrong == fine["context"][key]:
                continue
            encoded = copy.deepcopy(fine)
            encoded["context"][key] = wrong
            with pytest.raises(sw.StateError, match=r"^x"):
                decode(encoded, "x")
    for context in (None, [], 3):
        with pytest.raises(sw.StateError, match=r"^x"):
            decode({**fine, "context": context}, "x")


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(
    "shape", [[], [-1], [2**62, 2**62], [1, 1], [5, 7, 9, 11, 13], None, [1.5]]
)
def test_another_shape_is_refused(kind: str, shape: Any) -> None:
    if kind == "coo, to be without values" and shape == [1, 1]:
        return  # an empty tensor may have any shape
    with pytest.raises(sw.StateError, match=r"^x"):
        decode({**described(kind), "shape": shape}, "x")


@pytest.mark.parametrize("kind", MAKERS)
def test_another_class_is_refused(kind: str) -> None:
    fine = described(kind)
    for other in ("torch:sparse_coo", "torch:jagged", "torch:per_tensor_affine", "torch:x", 3, []):
        if other != fine["class"]:
            with pytest.raises(sw.StateError, match=r"^x"):
                decode({**fine, "class": other}, "x")


INDICES = [key for key in MAKERS if not key.startswith("q") and "without values" not in key]


@pytest.mark.parametrize("kind", INDICES)
@pytest.mark.parametrize("number", [-1, 1000, 2**31 - 1])
def test_an_index_outside_of_the_tensor_is_refused(kind: str, number: int) -> None:
    tensor, fine = MAKERS[kind](1), described(kind)
    for key in fine["tensors"]:
        if key == "values":
            continue
        component = {
            "indices": lambda: tensor._indices(),
            "offsets": lambda: tensor.offsets(),
            "lengths": lambda: tensor.lengths(),
        }.get(key, lambda key=key: getattr(tensor, key)())()
        for at in range(component.numel()):
            wrong = component.clone()
            wrong.view(-1)[at] = number
            encoded = copy.deepcopy(fine)
            encoded["tensors"][key] = encode(wrong, "x")
            with pytest.raises(sw.StateError, match=r"^x"):
                decode(encoded, "x")
