"""Resize tensors while they are loaded, for example the embedding of a larger vocabulary."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import msgspec

from shardwise.adapters import bind_state
from shardwise.adapters.values import TensorBinding
from shardwise.engine.exchange import exchange
from shardwise.engine.group import Group
from shardwise.engine.opened import Opened
from shardwise.errors import MismatchError, StateError
from shardwise.plan.lookup import SavedState
from shardwise.state.leaves import ParameterOrder
from shardwise.state.selection import Selection

KEEP_COMMON = "keep-common"
Shape = tuple[int, ...]


class Target(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of the target that may be resized.

    Attributes:
        shape: the global shape in the target.
        within: the name within the module.
        is_meta: whether the tensor is on the meta device on any rank.
    """

    shape: Shape
    within: str
    is_meta: bool


@dataclass(frozen=True, slots=True)
class Resizing:
    """The tensors that a load resizes; the same on all ranks.

    Attributes:
        targets: the tensors, by their names in the target.
        optimizers: the names of the optimizers of the target.
    """

    targets: Mapping[str, Target] = field(default_factory=dict)
    optimizers: Collection[str] = ()

    @classmethod
    def agreed(
        cls, resize: Mapping[str, str], state: MutableMapping[str, object], group: Group
    ) -> Resizing:
        """Find the tensors that `resize` names, on all ranks together.

        Args:
            resize: a mapping of shell patterns to `"keep-common"`; the same on all ranks.
            state: the target.
            group: the ranks.

        Raises:
            StateError: `resize` is not such a mapping.
            MismatchError: a pattern matches no tensor.
        """
        if not resize:
            return cls()

        def speak() -> bytes:
            _check(resize)
            return msgspec.msgpack.encode(_named(resize, state))

        def answer(said: list[bytes]) -> bytes:
            found: dict[str, Target] = {}
            optimizers: dict[str, None] = {}
            for each in said:
                targets, names = msgspec.msgpack.decode(
                    each, type=tuple[dict[str, Target], list[str]]
                )
                optimizers |= dict.fromkeys(names)
                for name, target in targets.items():
                    other = found.get(name, target)
                    is_meta = target.is_meta or other.is_meta
                    found[name] = Target(target.shape, target.within, is_meta)
            unmatched = [each for each in resize if not any(fnmatchcase(n, each) for n in found)]
            if unmatched:
                raise MismatchError(
                    "resize= has names or patterns that match no tensor of the state:", unmatched
                )
            return msgspec.msgpack.encode((found, [*optimizers]))

        reply = exchange(group, "finding tensors to resize", speak, answer)
        return cls(*msgspec.msgpack.decode(reply, type=tuple[dict[str, Target], list[str]]))

    def order_before(self, order: ParameterOrder, saved: SavedState) -> ParameterOrder:
        """Return the order of an optimizer's parameters with the shapes of the checkpoint."""
        before: dict[tuple[str, Shape], Shape] = {}
        for name, target in self.targets.items():
            entry = saved.tensor(name)
            if entry is not None:
                before[target.within, target.shape] = before[name, target.shape] = entry.shape
        return [[(n, before.get((n, shape), shape)) for n, shape in group] for group in order]

    def applied(self, opened: Opened, saved: SavedState, selection: Selection) -> Opened:
        """Return a view of the checkpoint in which the resized tensors have the target's shapes.

        Only elements that both shapes contain are read. The moments of a parameter are resized with
        the parameter.

        Args:
            opened: the checkpoint.
            saved: the names of the checkpoint, found by the target's names.
            selection: the names that are loaded.

        Raises:
            StateError: new elements of a tensor would have no value, an optimizer's state has
                another shape than the parameter (for example factored moments), or the tensor is a
                mean of several copies.
        """
        shapes: dict[str, Shape] = {}
        for name, target in self.targets.items():
            entry = saved.tensor(name)
            if entry is None or len(entry.shape) != len(target.shape):
                continue  # reported when names are matched
            if target.is_meta and any(
                a > b for a, b in zip(target.shape, entry.shape, strict=True)
            ):
                raise StateError(
                    f"{name}: the tensor is larger than in the checkpoint and on the meta device, "
                    "so its new elements have no values: initialize the tensor before loading"
                )
            shapes[entry.name] = target.shape
            for moment in self._moments(name, target, saved, selection):
                shapes[moment] = target.shape
        if not shapes:
            return opened
        tensors = opened.manifest.tensors
        means = [tensors[i].name for i in opened.means if tensors[i].name in shapes]
        if means:
            raise StateError(
                f"{means[0]}: the load averages several copies of this tensor, so the tensor "
                "cannot be resized; remove its name from resize="
            )
        changed = tuple(
            msgspec.structs.replace(each, shape=shapes[each.name]) if each.name in shapes else each
            for each in tensors
        )
        return replace(opened, manifest=msgspec.structs.replace(opened.manifest, tensors=changed))

    def _moments(
        self, name: str, target: Target, saved: SavedState, selection: Selection
    ) -> Iterator[str]:
        """Yield the names of the optimizers' moments of a parameter, which are resized with it."""
        parameter = saved.tensor(name)
        if parameter is None or parameter.shape == target.shape:
            return
        for optimizer in self.optimizers:
            start = {f"{optimizer}.{within}" for within in (target.within, name)}
            names = [f"{each}.{key}" for each in start for key in saved.below(each)]
            for entry in map(saved.tensor, filter(selection.chooses, names)):
                if entry is None or (math.prod(entry.shape) == 1 != math.prod(parameter.shape)):
                    continue  # a plain value, or a single number, for example the count of steps
                if entry.shape != parameter.shape:
                    raise StateError(
                        f"{entry.name}: the shape {list(entry.shape)} cannot be resized, because "
                        f"the parameter has the shape {list(parameter.shape)}: load "
                        f"without the optimizer's state, with skip=[{f'{optimizer}.*'!r}]"
                    )
                yield entry.name


def _check(resize: object) -> None:
    if not isinstance(resize, Mapping) or not all(isinstance(each, str) for each in resize):
        raise StateError(
            f"resize={resize!r}: expected a mapping of names, for example "
            f'{{"model.embed.weight": "{KEEP_COMMON}"}}'
        )
    wrong = [name for name, how in resize.items() if how != KEEP_COMMON]
    if wrong:
        raise StateError(f"resize={{{wrong[0]!r}: {resize[wrong[0]]!r}}}: expected {KEEP_COMMON!r}")


def _named(
    patterns: Mapping[str, str], state: MutableMapping[str, object]
) -> tuple[dict[str, Target], list[str]]:
    """Return this rank's optimizers, and its tensors that match a pattern or are tied to such."""
    bindings = bind_state(state, allow_pickle=True)
    leaves = [
        (binding.name, leaf)
        for binding in bindings
        if binding.kind == "module" or isinstance(binding, TensorBinding)
        for leaf in binding.local_state().tensors
    ]
    chosen = {
        leaf.name for _, leaf in leaves if any(fnmatchcase(leaf.name, each) for each in patterns)
    }
    tied = {leaf.identity for _, leaf in leaves if leaf.name in chosen} - {None}
    targets = {
        leaf.name: Target(
            leaf.shape,
            leaf.name.removeprefix(f"{owner}."),
            any(fragment.data.is_meta for fragment in leaf.fragments),
        )
        for owner, leaf in leaves
        if leaf.name in chosen or leaf.identity in tied
    }
    return targets, [each.name for each in bindings if each.kind == "optimizer"]
