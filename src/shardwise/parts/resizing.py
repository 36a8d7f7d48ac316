"""Resize tensors during a load, for example embeddings after the vocabulary has grown."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import msgspec

from shardwise.kernel.adapters.values import TensorBinding
from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.engine.group import Group
from shardwise.kernel.engine.rounds import Round
from shardwise.kernel.errors import MismatchError, StateError
from shardwise.kernel.manifest.layout import Layout
from shardwise.ports.binding import Binding, ParameterOrder, SavedNames, Selection

KEEP_COMMON = "keep-common"
Shape = tuple[int, ...]


@prepare_decoding
class ResizeTarget(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of the target that may be resized.

    Attributes:
        shape: the global shape in the target.
        name_in_module: the name within the module.
        is_meta: whether the tensor is on the meta device on any rank.
    """

    shape: Shape
    name_in_module: str
    is_meta: bool


_Found = tuple[dict[str, ResizeTarget], list[str]]
"""The tensors that match a pattern, and the names of the optimizers, of some ranks."""


@dataclass(frozen=True, slots=True)
class Resizing:
    """The tensors that a load resizes. The value is equal on all ranks.

    Attributes:
        targets: the tensors, by name.
        optimizers: the names of the target's optimizers.
    """

    targets: Mapping[str, ResizeTarget] = field(default_factory=dict)
    optimizers: Collection[str] = ()

    @classmethod
    def from_patterns(
        cls, resize: Mapping[str, str], bindings: Sequence[Binding], group: Group
    ) -> Resizing:
        """Find the tensors that match the patterns of `resize`. All ranks call this together.

        Args:
            resize: maps shell patterns of names to `"keep-common"`; the same on all ranks.
            bindings: the bindings of the state to fill.
            group: the ranks.

        Raises:
            StateError: `resize` has the wrong type, or values other than `"keep-common"`.
            MismatchError: a pattern matches no tensor.
        """

        with Round(group, "finding tensors to resize") as all_ranks:
            _check_patterns(resize)
            own = _find_targets(resize, bindings)
            targets, optimizers = all_ranks.all_reduce(own, _Found, _unite_found)
        unmatched = [each for each in resize if not any(fnmatchcase(n, each) for n in targets)]
        if unmatched:
            raise MismatchError(
                "resize= has patterns that match no tensor of the state; correct them:", unmatched
            )
        return cls(targets, optimizers)

    def order_with_saved_shapes(self, order: ParameterOrder, saved: SavedNames) -> ParameterOrder:
        """Return the order of an optimizer's parameters, with their shapes in the checkpoint."""
        saved_shapes: dict[tuple[str, Shape], Shape] = {}
        for name, target in self.targets.items():
            entry = saved.tensor(name)
            if entry is not None:
                saved_shapes[target.name_in_module, target.shape] = saved_shapes[
                    name, target.shape
                ] = entry.shape
        return [[(n, saved_shapes.get((n, shape), shape)) for n, shape in group] for group in order]

    def apply(self, layout: Layout, saved: SavedNames, selection: Selection) -> Layout:
        """Return the layout in which resized tensors have the shapes of the target.

        A load reads only elements that are inside of both shapes. The optimizer's moments of a
        parameter are resized with the parameter.

        Args:
            layout: the checkpoint.
            saved: the contents of the checkpoint, looked up by the names of the target.
            selection: the names that are loaded.

        Raises:
            StateError: new elements of a tensor would have no value; the state of an optimizer has
                another shape than its parameter, for example factored moments; or a tensor to
                resize is the mean of several saved tensors (the terms of the mean).
        """
        shapes: dict[str, Shape] = {}
        for name, target in self.targets.items():
            entry = saved.tensor(name)
            if entry is None or len(entry.shape) != len(target.shape):
                continue  # the load reports the mismatch later
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
            return layout
        tensors = layout.tensors
        means = [tensors[i].name for i in layout.terms_of if tensors[i].name in shapes]
        if means:
            raise StateError(
                f"{means[0]}: the load averages several copies of this tensor, so the tensor "
                "cannot be resized; remove its name from resize="
            )
        resized = tuple(
            msgspec.structs.replace(each, shape=shapes[each.name]) if each.name in shapes else each
            for each in tensors
        )
        return replace(layout, tensors=resized)

    def _moments(
        self, name: str, target: ResizeTarget, saved: SavedNames, selection: Selection
    ) -> Iterator[str]:
        """Yield the names of a parameter's moments in the optimizers' states."""
        parameter = saved.tensor(name)
        if parameter is None or parameter.shape == target.shape:
            return
        for optimizer in self.optimizers:
            prefixes = {f"{optimizer}.{each}" for each in (target.name_in_module, name)}
            names = [f"{prefix}.{key}" for prefix in prefixes for key in saved.names_below(prefix)]
            for entry in map(saved.tensor, filter(selection.selects, names)):
                if entry is None or (math.prod(entry.shape) == 1 != math.prod(parameter.shape)):
                    continue  # a plain value or a scalar, for example the number of steps
                if entry.shape != parameter.shape:
                    raise StateError(
                        f"{entry.name}: cannot resize this state of shape {list(entry.shape)}, "
                        f"because its parameter has shape {list(parameter.shape)}: load without "
                        f"the optimizer's state, with skip=[{f'{optimizer}.*'!r}]"
                    )
                yield entry.name


def _unite_found(messages: Sequence[_Found]) -> _Found:
    """Return the tensors and optimizers of some ranks together."""
    targets: dict[str, ResizeTarget] = {}
    for own, _ in messages:
        for name, target in own.items():
            other = targets.get(name, target)
            first = min(target, other, key=lambda each: (each.shape, each.name_in_module))
            is_meta = target.is_meta or other.is_meta
            targets[name] = msgspec.structs.replace(first, is_meta=is_meta)
    optimizers = {name for _, names in messages for name in names}
    return dict(sorted(targets.items())), sorted(optimizers)


def _check_patterns(resize: object) -> None:
    if not isinstance(resize, Mapping) or not all(isinstance(each, str) for each in resize):
        raise StateError(
            f"resize={resize!r}: expected a mapping of names, for example "
            f'{{"model.embed.weight": "{KEEP_COMMON}"}}'
        )
    wrong = [name for name, mode in resize.items() if mode != KEEP_COMMON]
    if wrong:
        raise StateError(f"resize={{{wrong[0]!r}: {resize[wrong[0]]!r}}}: expected {KEEP_COMMON!r}")


def _find_targets(patterns: Mapping[str, str], bindings: Sequence[Binding]) -> _Found:
    """Return this rank's tensors that match a pattern, and the names of its optimizers.

    The result includes the tensors that are tied to a matching tensor.
    """
    leaves = [
        (binding.name, leaf)
        for binding in bindings
        if binding.kind == "module" or isinstance(binding, TensorBinding)
        for leaf in binding.local_state().tensors
    ]
    matching = {
        leaf.name for _, leaf in leaves if any(fnmatchcase(leaf.name, each) for each in patterns)
    }
    tied = {leaf.tie_key for _, leaf in leaves if leaf.name in matching} - {None}
    targets = {
        leaf.name: ResizeTarget(
            leaf.shape,
            leaf.name.removeprefix(f"{owner}."),
            any(fragment.data.is_meta for fragment in leaf.fragments),
        )
        for owner, leaf in leaves
        if leaf.name in matching or leaf.tie_key in tied
    }
    return targets, [each.name for each in bindings if each.kind == "optimizer"]
