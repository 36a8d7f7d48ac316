"""Save only the trained part of a module, and a fingerprint of its frozen part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardwise.kernel.errors import StateError
from shardwise.kernel.manifest.manifest import ADAPTERS, FROZEN
from shardwise.kernel.state.name_lookup import is_below
from shardwise.parts.frameworks.peft import find_adapters
from shardwise.parts.frameworks.trained import TrainingHistory, tensors_by_name
from shardwise.ports.binding import (
    Binding,
    Context,
    JsonValue,
    LocalState,
    Parameter,
    SavedNames,
    Selection,
    TensorLeaf,
    decode,
    encode,
    tensor_leaf,
)
from shardwise.ports.module_binding import (
    ModuleBinding,
    is_dtensor,
    is_instance,
    modules_in,
    view_for_numpy,
)

_SAMPLES_PER_TENSOR = 4
_SEPARATOR = " 0x"
_FAKE = "torch._subclasses.fake_tensor", "FakeTensor"


@dataclass(frozen=True, slots=True)
class Trainable:
    """A module of which only the trained part is saved; see `trainable`.

    Attributes:
        whole_is_base: whether frozen parameters in a checkpoint of the whole module are the base,
            which later saves leave out. Integrations set it if the user chose so.
    """

    module: nn.Module | Sequence[nn.Module]
    also: tuple[str, ...]
    buffers: bool
    base: str
    whole_is_base: bool = False


def trainable(
    module: nn.Module | Sequence[nn.Module],
    *,
    also: Sequence[str] = (),
    buffers: bool = True,
    base: str = "",
) -> Trainable:
    """Return what to put into a state in place of a module, to save only its trained part.

    A save stores the persistent buffers, and the parameters that may differ from the base:

    - those that require gradients, or did so when `trainable`, a save or a load saw the module,
    - those that changed after `trainable` first saw the module,
    - those that a load of the module by `trainable` has filled,
    - those for which an optimizer of the state has state, such as moments,
    - all adapters of PEFT, trained or not.

    Of all other parameters, the *frozen* ones, it stores a fingerprint: names, dtypes, shapes, and
    four elements of each. A load compares the fingerprint with the frozen parameters of the module,
    and raises a `MismatchError` if they differ. A load does not change frozen parameters. There
    is one exception: if the checkpoint stores such a parameter, because it was trained then, or
    because the whole module was saved, the load fills it.

    So load the base model before you call `trainable`. What was trained before the first call, in
    the same process, and is frozen now, counts as the base.

    Example:

        model = get_peft_model(base_model, LoraConfig())
        state = {"model": sw.trainable(model), "optimizer": optimizer}

    Args:
        module: a module, a list of the parts of a model, or a DeepSpeed engine.
        also: shell patterns of the names of frozen tensors to save, too, for example
            `["*lora_*"]` for adapters that are not trained at present.
        buffers: whether to save persistent buffers, such as the statistics of BatchNorm. If False,
            they count as frozen. Pass False if the base model keeps its weights in buffers, as
            quantized models of GPTQ do.
        base: a name of the frozen part, for errors, for example `"meta-llama/Llama-3.1-8B"`.

    Raises:
        StateError: `also` is not a list of patterns.
    """
    is_list = isinstance(also, Iterable) and not isinstance(also, str)
    if not is_list or not all(isinstance(each, str) for each in also):
        raise StateError(
            f"sw.trainable(also={also!r}): expected a list of patterns, for example ['*lora_*']"
        )
    TrainingHistory(modules_in(module))  # notes what requires gradients now
    return Trainable(module, tuple(also), buffers, base)


def bind(name: str, value: object, context: Context) -> TrainableBinding | None:
    """Return the binding of what `trainable` returned.

    Raises:
        StateError: the value is a list of results of `trainable`; or the object in it is not a
            module, or is a module that describes its own sharding.
    """
    if isinstance(value, (list, tuple)) and any(isinstance(part, Trainable) for part in value):
        raise StateError(
            f"{name}: a list of sw.trainable(…): pass sw.trainable([…]) with the parts of one "
            "model, or put several models into a dict, each under a separate key"
        )
    if not isinstance(value, Trainable):
        return None
    module = context.bind(name, value.module)
    if isinstance(module, ModuleBinding):
        return TrainableBinding(module, value, context)
    if module is None or module.kind != "module":
        raise StateError(
            f"{name}: sw.trainable got a {type(value.module).__name__}: pass a module, a list "
            "of the parts of a model, or a DeepSpeed engine"
        )
    raise StateError(
        f"{name}: sw.trainable does not support a {type(value.module).__name__}, for which "
        f"{type(module).__name__} decides what is saved: put the model itself into the state"
    )


class TrainableBinding(Binding):
    """A module whose frozen tensors are not saved, but described by a fingerprint.

    The fingerprint has the dtype, the shape, and a few elements of each frozen tensor. Which
    elements these are depends only on the tensor's shape. Each rank describes those that it holds;
    all ranks together describe the same elements under every sharding.

    Args:
        module: the binding of the whole module.
        spec: what counts as frozen.
        context: the state. Its optimizers show what was trained.
    """

    kind = "module"

    def __init__(self, module: ModuleBinding, spec: Trainable, context: Context) -> None:
        self.name = module.name
        self.optimizers = module.optimizers
        self.module = module
        self._spec = spec
        self._bindings = context.bindings
        self._elements = f"{module.name}.{FROZEN}.elements"
        self._base_key = f"{module.name}.{FROZEN}.base"
        self._adapters_key = f"{module.name}.{FROZEN}.{ADAPTERS}"
        # What only `targets` knows: frozen tensors that the load fills, and whether with the base.
        self._filled: list[str] = []
        self._fills_base = False
        # Tensors that cannot be saved, for example quantized ones, and the reasons.
        self._unsavable: dict[str, tuple[torch.Tensor, Exception]] = {}
        module.leaf_of = self._leaf_of

    def parameters(self) -> Iterable[Parameter]:
        """Return all parameters by their clean names."""
        return self.module.parameters()

    def local_state(self) -> LocalState:
        """Return the trained tensors, and the fingerprint of the frozen ones as plain values.

        Raises:
            StateError: a tensor to save cannot be saved; or this rank has only a part of a frozen
                tensor, and it changed.
        """
        local_state = self.module.local_state()
        history, tensors = self._history(), tensors_by_name(self.parameters())
        adapters, configs = find_adapters(self.module.parts)
        is_trained = {
            name: tensor.requires_grad
            or history.is_kept(name, tensor)
            or is_below(f"{self.name}.{name}", adapters)
            for name, tensor in tensors.items()
        }

        def is_saved(name: str) -> bool:
            also = any(fnmatchcase(name, pattern) for pattern in self._spec.also)
            return also or (name not in tensors and history.is_kept(name, None))

        frozen = self._take_frozen(local_state, is_trained, is_saved)
        fingerprint = self._fingerprint_of(frozen)
        for leaf in frozen:
            name, values = leaf.name.removeprefix(f"{self.name}."), fingerprint.get(leaf.name, {})
            if values and history.has_changed(name, values, _kind_of(values)):
                self._refuse_changed_part(leaf)
                history.keep(name, tensors.get(name))
                local_state.tensors.append(leaf)
                del fingerprint[leaf.name]
        for values in fingerprint.values():
            local_state.objects |= values
        for leaf in local_state.tensors:
            self._refuse_unsavable(leaf.name)
        if frozen and self._spec.base:
            local_state.objects[self._base_key] = self._spec.base
        if frozen:
            for name, document in configs.items():
                local_state.objects[f"{self._adapters_key}.{name}"] = encode(document, name)
        return local_state

    def targets(self, saved: SavedNames, selection: Selection) -> LocalState:
        """Return what to load, after comparing the frozen tensors that the checkpoint lacks."""
        local_state = self.module.all_targets(saved, selection)
        saved_fingerprint = self._saved_fingerprint(saved)
        for leaf in local_state.tensors:
            local_state.unselected += saved_fingerprint.get(leaf.name, ())
        tensors = tensors_by_name(self.parameters())
        is_trained = {name: tensor.requires_grad for name, tensor in tensors.items()}
        described, self._filled = [], []
        self._fills_base = self._spec.whole_is_base and not saved_fingerprint
        for leaf in self._take_frozen(local_state, is_trained, lambda name: False):
            if saved.tensor(leaf.name) is None and leaf.name in saved_fingerprint:
                described.append(leaf)
                continue
            local_state.tensors.append(leaf)
            if selection.selects(leaf.name):
                self._filled.append(leaf.name.removeprefix(f"{self.name}."))
        for leaf in local_state.tensors:
            if selection.selects(leaf.name):
                self._refuse_unsavable(leaf.name)
        if saved.has_object(self._base_key):
            local_state.unselected.append(self._base_key)
        for each in saved.names_below(self._adapters_key):
            local_state.unselected.append(f"{self._adapters_key}.{each}")
        problems = self._compare(described, saved_fingerprint, selection)
        if problems:
            local_state.problems += [self._describe_other_base(saved), *problems]
        return selection.select_from(local_state)

    def restore(self, values: Mapping[str, JsonValue]) -> None:
        """Set extra state, after the tensors are filled. Later saves have all that was filled."""
        self.module.restore(values)
        history, tensors = self._history(), tensors_by_name(self.parameters())
        for name in self._filled:
            if self._fills_base:
                history.forget(name, tensors.get(name))
            else:
                history.keep(name, tensors.get(name))

    def rebuild_weights(self) -> None:
        """Compute the module's weights from the loaded master weights. This is a collective."""
        self.module.rebuild_weights()

    def _history(self) -> TrainingHistory:
        """Return what was trained, after looking at the module and the optimizers of the state."""
        history = TrainingHistory([part.module for part in self.module.parts])
        for binding in self._bindings:
            for optimizer in binding.optimizers:
                history.keep_stepped(optimizer)
        return history

    def _leaf_of(self, name: str, tensor: torch.Tensor) -> TensorLeaf:
        """Return a leaf of the module. If the tensor cannot be saved, the leaf has no fragments."""
        try:
            return tensor_leaf(name, tensor)
        except StateError as error:
            if is_lazy(tensor) or is_instance(tensor, *_FAKE) or tensor.is_nested:
                raise
            self._unsavable[name] = tensor, error
            return TensorLeaf(name, tensor.dtype, tuple(tensor.shape), (), id(tensor))

    def _refuse_unsavable(self, name: str) -> None:
        if name in self._unsavable:
            raise self._unsavable[name][1]

    def _refuse_changed_part(self, leaf: TensorLeaf) -> None:
        """Raise an error for a changed tensor, unless this rank has all of it.

        Ranks with other parts may not see the change.
        """
        if sum(each.data.numel() for each in leaf.fragments) != math.prod(leaf.shape):
            name = leaf.name.removeprefix(f"{self.name}.")
            raise StateError(
                f"{leaf.name}: frozen, but its values have changed since the first save, so the "
                "base model does not have them, and only some ranks can see it: pass "
                f"sw.trainable(…, also=[{name!r}]) to save it"
            )

    def _take_frozen(
        self,
        local_state: LocalState,
        is_trained: Mapping[str, bool],
        is_saved: Callable[[str], bool],
    ) -> list[TensorLeaf]:
        """Remove the frozen tensors, and return them.

        The first of these rules that applies to a tensor decides:

        1. `is_saved` returns True for its name: it is saved.
        2. It is a parameter, or tied to a parameter: it is frozen if this parameter is not trained.
        3. `state_dict` generated it, such as the scale of a quantized parameter: it is frozen if
           its name is below that of a frozen parameter, as `up.weight.absmax` is below
           `up.weight`; or if its module has only frozen parameters, as for `up.scale`.
        4. It is a buffer: it is frozen if the user passed `buffers=False`.

        Args:
            local_state: the whole module.
            is_trained: whether each parameter is trained, or differs from the base.
            is_saved: whether a tensor of this name is saved in any case.
        """
        prefix = f"{self.name}."
        leaves = {leaf.name.removeprefix(prefix): leaf for leaf in local_state.tensors}
        trained_by_tie_key: dict[object, bool] = {}
        for name, leaf in leaves.items():
            if leaf.tie_key is not None and name in is_trained:
                trained = trained_by_tie_key.get(leaf.tie_key, False) or is_trained[name]
                trained_by_tie_key[leaf.tie_key] = trained
        frozen_generated = self._frozen_among_generated(is_trained)

        def is_frozen(name: str, leaf: TensorLeaf) -> bool:
            if is_saved(name):
                return False
            if leaf.tie_key in trained_by_tie_key:  # FSDP1 hides second names
                return not trained_by_tie_key[leaf.tie_key]
            if name in is_trained:
                return not is_trained[name]
            if name in frozen_generated:
                return frozen_generated[name]
            return not self._spec.buffers

        frozen = {
            leaf.name: leaf
            for name, leaf in leaves.items()
            if 0 not in leaf.shape and is_frozen(name, leaf)
        }
        local_state.tensors = [leaf for leaf in local_state.tensors if leaf.name not in frozen]
        return [*frozen.values()]

    def _frozen_among_generated(self, is_trained: Mapping[str, bool]) -> dict[str, bool]:
        """Return whether each tensor that `state_dict` generated is frozen, by name."""
        frozen_names = {name for name, trained in is_trained.items() if not trained}
        trained_modules = {_module_of(name) for name in is_trained.keys() - frozen_names}
        frozen_modules = {_module_of(name) for name in frozen_names} - trained_modules
        generated = [name.removeprefix(f"{self.name}.") for name in self.module.generated_names()]
        return {
            name: is_below(name, frozen_names) or _module_of(name) in frozen_modules
            for name in generated
        }

    def _fingerprint_of(self, leaves: Sequence[TensorLeaf]) -> dict[str, dict[str, str]]:
        """Return plain values that describe tensors: for each tensor, values by their names.

        A value has the dtype and the shape of the tensor, and the bytes of one element. Two values
        of a tensor with 4096 elements:

            "model._frozen.elements.up.weight[512]": "bfloat16 [64, 64] 0x3f3d"
            "model._frozen.elements.up.weight[1536]": "bfloat16 [64, 64] 0x12bc"

        A tensor that cannot be saved, such as a quantized one, is described by its class and by
        elements of the tensors in it:

            "model._frozen.elements.up.weight[class]": "Int8Tensor bfloat16 [64, 64] 0x"
            "model._frozen.elements.up.weight[qdata int8 64x64 512]": "Int8Tensor bf… [64, 64] 0x3f"

        Raises:
            StateError: a tensor is on the meta device.
        """
        alike: dict[object, list[tuple[str, str, str, torch.Tensor]]] = {}
        found: dict[str, dict[str, str]] = {}
        for leaf in leaves:
            kind = f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
            own_name = f"{self._elements}.{leaf.name.removeprefix(f'{self.name}.')}"
            parts = [("", leaf)]
            if leaf.name in self._unsavable:
                tensor, _ = self._unsavable[leaf.name]
                kind = f"{_class_of(tensor)} {kind}"
                found[leaf.name] = {f"{own_name}[class]": f"{kind}{_SEPARATOR}"}
                parts = [*_parts_of(leaf.name, tensor)]
            for where, part in parts:
                for position in _positions_of(math.prod(part.shape)):
                    element = _element_of(part, position)
                    if element is not None:
                        item = (leaf.name, f"{own_name}[{where}{position}]", kind, element)
                        alike.setdefault((element.device, element.dtype), []).append(item)
        for items in alike.values():  # one copy for each device and dtype
            rows = torch.stack([element for *_, element in items]).cpu().numpy()
            for (name, key, kind, _), row in zip(items, rows, strict=True):
                found.setdefault(name, {})[key] = f"{kind}{_SEPARATOR}{row.tobytes().hex()}"
        return found

    def _saved_fingerprint(self, saved: SavedNames) -> dict[str, dict[str, str]]:
        """Return the fingerprint in a checkpoint, in the form of `_fingerprint_of`."""
        found: dict[str, dict[str, str]] = {}
        for below in saved.names_below(self._elements):
            name, key = below.rpartition("[")[0], f"{self._elements}.{below}"
            value = decode(saved.object(key), key) if saved.has_object(key) else None
            found.setdefault(f"{self.name}.{name}", {})[key] = str(value)
        return found

    def _compare(
        self,
        leaves: Sequence[TensorLeaf],
        saved_fingerprint: Mapping[str, Mapping[str, str]],
        selection: Selection,
    ) -> list[str]:
        """Return a line for each frozen tensor that differs from the saved fingerprint."""
        problems = []
        for name, values in self._fingerprint_of(leaves).items():
            saved_values = saved_fingerprint[name]
            selected = {key: value for key, value in values.items() if selection.selects(key)}
            kind, saved_kind = _kind_of(values), _kind_of(saved_values)
            if selected and kind != saved_kind:
                problems.append(
                    f"{name}: frozen, {saved_kind} in the checkpoint, {kind} in the target"
                )
            elif any(saved_values.get(key) != value for key, value in selected.items()):
                problems.append(f"{name}: frozen, other values than at the save")
        return problems

    def _describe_other_base(self, saved: SavedNames) -> str:
        """Return a summary of the problems that `_compare` found, and what to do."""
        bases = ""
        if saved.has_object(self._base_key) and self._spec.base:
            saved_base = decode(saved.object(self._base_key), self._base_key)
            bases = f" ({saved_base} at the save, {self._spec.base} now)"
        return (
            f"{self.name}: its frozen parameters are not those with which the checkpoint "
            f"was trained{bases}: load the same base model first. To accept another one, pass "
            f"skip=['{self.name}.{FROZEN}.*']"
        )


def _class_of(tensor: torch.Tensor) -> str:
    """Return the class of a tensor; of a DTensor, also the class of its local part."""
    name = type(tensor).__name__
    return f"{name} of {_class_of(tensor._local_tensor)}" if is_dtensor(tensor) else name


def _parts_of(name: str, tensor: torch.Tensor, where: str = "") -> Iterator[tuple[str, TensorLeaf]]:
    """Yield the plain tensors in a tensor that wraps others, with their places, such as "scale".

    The parts of a sharded DTensor are left out, because every rank has others.
    """
    if is_dtensor(tensor) and any(not each.is_replicate() for each in tensor.placements):
        return
    flatten = getattr(tensor, "__tensor_flatten__", None)
    for attribute in () if flatten is None else flatten()[0]:
        inner = getattr(tensor, attribute)
        if not isinstance(inner, torch.Tensor):
            continue
        try:
            leaf = tensor_leaf(f"{name}.{where}{attribute}", inner)
        except StateError:
            yield from _parts_of(name, inner, f"{where}{attribute}.")
        else:
            kind = f"{str(leaf.dtype).removeprefix('torch.')} {'x'.join(map(str, leaf.shape))}"
            yield f"{where}{attribute} {kind} ", leaf


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _kind_of(values: Mapping[str, str]) -> str:
    """Return the dtype and the shape, which all values of a tensor's fingerprint have."""
    return next(iter(values.values())).partition(_SEPARATOR)[0]


def _positions_of(size: int) -> list[int]:
    """Return the elements, in row-major order, that describe a tensor of this size."""
    positions = {
        size * (2 * i + 1) // (2 * _SAMPLES_PER_TENSOR) for i in range(_SAMPLES_PER_TENSOR)
    }
    return sorted(positions) if size else []


def _element_of(leaf: TensorLeaf, position: int) -> torch.Tensor | None:
    """Return an element of a tensor as an integer; None if this rank does not hold it."""
    index = [int(i) for i in np.unravel_index(position, leaf.shape)]
    for fragment in leaf.fragments:
        local = tuple(i - o for i, o in zip(index, fragment.box.offset, strict=True))
        if all(0 <= i < n for i, n in zip(local, fragment.box.shape, strict=True)):
            if fragment.data.is_meta:
                raise StateError(
                    f"{leaf.name}: this frozen parameter is on the meta device and has no values: "
                    "load the base model first"
                )
            return view_for_numpy(fragment.data)[local]
    return None
