"""Find the changes that a LoRA adapter makes to its base model, from the manifests of both."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shardwise.decoding import prepare_decoding
from shardwise.errors import FormatError, MismatchError, StateError
from shardwise.manifest.manifest import Manifest, TensorEntry

FLOATS = ("float16", "bfloat16", "float32", "float64")
HARMLESS_INITS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of PEFT's `init_lora_weights` that do not change the base."""
UNMERGEABLE_SETTINGS = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "kasa_config",
    "monteclora_config",
    "velora_config",
    "arrow_config",
    "alora_invocation_tokens",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
)
"""Settings of PEFT that cannot be merged: their adapters have more than two factors per weight."""
_FACTOR_NAME = re.compile(
    r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[aAbB])"
    r"(?:\.(?P<adapter>(?!weight$|bias$)[^.]+))?(?:\.(?P<kind>weight|bias))?"
)
_WHOLE_TENSOR_NAME = re.compile(r"(?P<module>.+)\.modules_to_save\.[^.]+\.(?P<rest>.+)")
_PLAIN_PATTERN = re.compile(r"\^?[\w.]+")


@prepare_decoding
class AdapterConfig(msgspec.Struct, frozen=True):
    """The settings in PEFT's `adapter_config.json` that determine how an adapter is applied."""

    r: int
    lora_alpha: float
    peft_type: str = "LORA"
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    init_lora_weights: bool | str = True

    def alpha_of(self, module: str) -> float:
        """Return the LoRA alpha of a module, given its name in the model.

        Raises:
            StateError: `alpha_pattern` has a regular expression that is not a plain name.
        """
        for pattern, alpha in self.alpha_pattern.items():
            if not _PLAIN_PATTERN.fullmatch(pattern):
                raise StateError(
                    f"adapter_config.json: alpha_pattern has {pattern!r}, but merging supports "
                    "only plain module names: pass one alpha= for all modules, or merge with PEFT"
                )
            whole = pattern.removeprefix("^")
            if module == whole or (whole == pattern and module.endswith(f".{pattern}")):
                return alpha
        return self.lora_alpha


def decode_config(data: bytes, path: str) -> AdapterConfig:
    """Decode `adapter_config.json`.

    Args:
        path: the path of the file, for error messages.

    Raises:
        FormatError: the file is malformed.
        StateError: this kind of adapter cannot be merged.
    """
    try:
        raw = msgspec.json.decode(data, type=dict[str, Any])
        config = msgspec.convert(raw, AdapterConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            f"{path}: not a valid LoRA configuration of PEFT: {error}; copy it again from an "
            "intact source, or save the adapter again with PEFT"
        ) from error
    unsupported = [f"{name}={raw[name]!r:.60}" for name in UNMERGEABLE_SETTINGS if raw.get(name)]
    if config.peft_type != "LORA":
        unsupported.append(f"peft_type={config.peft_type!r}")
    if config.init_lora_weights not in HARMLESS_INITS:
        unsupported.append(
            f"init_lora_weights={config.init_lora_weights!r}, which changed the base (save it "
            "with path_initial_model_for_weight_conversion)"
        )
    if unsupported:
        raise StateError(
            f"{path}: only plain LoRA can be merged, but this adapter uses "
            f"{', '.join(unsupported)}: merge it with PEFT"
        )
    return config


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """An update of a weight: `scaling` × (`b` @ `a`) is added to it.

    Attributes:
        a: name of the factor of shape (rank, in).
        b: name of the factor of shape (out, rank).
        rank: the LoRA rank, the size of the inner dimension of the product.
        scaling: the factor of the product.
        transposed: whether the weight has the shape (in, out), so that the product is transposed.
        replacement: name of the adapter's copy of the weight, which replaces the base's weight.
            Only adapters of embeddings have one.
    """

    a: str
    b: str
    rank: int
    scaling: float
    transposed: bool
    replacement: str | None


@dataclass(frozen=True, slots=True)
class BiasUpdate:
    """An update of a bias: `scaling` × the adapter's tensor `name` is added to it."""

    name: str
    scaling: float


@dataclass(frozen=True, slots=True)
class Replacement:
    """The adapter's tensor `name` replaces the tensor of the base."""

    name: str


Change = LowRankUpdate | BiasUpdate | Replacement


@dataclass(slots=True)
class _Factors:
    """The adapter's tensors for one module."""

    a: TensorEntry | None = None
    b: TensorEntry | None = None
    bias: TensorEntry | None = None
    replacement: TensorEntry | None = None
    embedding: bool = False


@dataclass(slots=True)
class _AdapterTensors:
    """The adapter's tensors: the factors of each module, and replacements of the base's tensors."""

    factors: dict[str, _Factors] = field(default_factory=dict)
    whole_tensors: dict[str, TensorEntry] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Return the names of the weights that change."""
        return [*(f"{module}.weight" for module in self.factors), *self.whole_tensors]


def find_changes(
    adapter: Manifest,
    base: Manifest,
    root: str,
    config: AdapterConfig | None,
    alpha: float | None,
) -> dict[str, Change]:
    """Return, for each changed tensor of the base, the change that the adapter makes.

    Args:
        root: name of the model in the base; "" if the base is only a model.
        config: the adapter's configuration; None if it has none.
        alpha: the LoRA alpha to use in place of the configured one.

    Raises:
        MismatchError: names or shapes do not fit the base; `problems` lists them all.
        StateError: the checkpoint is not an adapter, or the adapter cannot be merged.
    """
    if config is None and alpha is None:
        raise StateError(
            "the adapter has no adapter_config.json: pass its LoRA alpha as alpha= "
            "(on the command line --alpha)"
        )
    found = _group_tensors(adapter.tensors)
    start = f"{root}." if root else ""
    model_tensors = {
        e.name.removeprefix(start): e for e in base.tensors if e.name.startswith(start)
    }
    prefix_length = _common_prefix_length(found.names(), model_tensors, root)
    changes: dict[str, Change] = {}
    problems: list[str] = []
    for name, factors in found.factors.items():
        module = name[prefix_length:]
        try:
            changes |= _module_changes(module, factors, model_tensors, config, alpha)
        except MismatchError as error:
            problems.append(f"{module}: {error.summary}")
    for name, entry in found.whole_tensors.items():
        target = model_tensors[name[prefix_length:]]
        if target.shape != entry.shape:
            shapes = f"shape {list(entry.shape)} in the adapter, {list(target.shape)} in the base"
            problems.append(f"{name[prefix_length:]}: {shapes}")
        changes[target.name] = Replacement(entry.name)
    problems += _tie_problems(changes, base)
    if problems:
        raise MismatchError(
            "the adapter does not fit the base; merge it into the base that it was trained on:",
            problems,
        )
    return changes


def _module_changes(
    module: str,
    factors: _Factors,
    model_tensors: Mapping[str, TensorEntry],
    config: AdapterConfig | None,
    alpha: float | None,
) -> dict[str, Change]:
    """Return the changes that an adapter makes to one module.

    Raises:
        MismatchError: the factors do not fit the module.
    """
    weight, bias = model_tensors[f"{module}.weight"], model_tensors.get(f"{module}.bias")
    transposed = factors.embedding or (config is not None and config.fan_in_fan_out)
    problem = _explain_misfit(factors, weight, transposed=transposed)
    if problem or factors.a is None or factors.b is None:
        raise MismatchError(problem, [])
    rank = factors.a.shape[0]
    if config is not None and not config.rank_pattern and rank != config.r:
        raise MismatchError(f"the rank is {rank}, but adapter_config.json has r={config.r}", [])
    module_alpha = (
        alpha if alpha is not None else config.alpha_of(module) if config is not None else 0.0
    )
    scaling = module_alpha / (math.sqrt(rank) if config is not None and config.use_rslora else rank)
    replacement = None if factors.replacement is None else factors.replacement.name
    a, b = factors.a.name, factors.b.name
    changes: dict[str, Change] = {
        weight.name: LowRankUpdate(a, b, rank, scaling, transposed, replacement)
    }
    if factors.bias is not None:
        if bias is None or bias.shape != factors.bias.shape:
            raise MismatchError(
                f"the adapter has a bias of shape {list(factors.bias.shape)}, but the base has "
                f"{'no bias' if bias is None else f'one of shape {list(bias.shape)}'}",
                [],
            )
        changes[bias.name] = BiasUpdate(factors.bias.name, scaling)
    return changes


def _group_tensors(tensors: Sequence[TensorEntry]) -> _AdapterTensors:
    """Group an adapter's tensors by the modules that they change.

    Raises:
        StateError: the tensors do not belong to exactly one adapter.
    """
    found = _AdapterTensors()
    adapters: set[str] = set()
    for entry in tensors:
        factor = _FACTOR_NAME.fullmatch(entry.name)
        if factor is None:
            if "lora_" in entry.name:
                raise StateError(
                    f"{entry.name}: this kind of LoRA tensor cannot be merged. Supported are "
                    "lora_A and lora_B of linear layers and embeddings, and modules_to_save"
                )
            whole = _WHOLE_TENSOR_NAME.fullmatch(entry.name)
            name = f"{whole['module']}.{whole['rest']}" if whole else entry.name
            found.whole_tensors[name.replace(".base_layer.", ".")] = entry
            continue
        adapters.add(factor["adapter"] or "")
        module_factors = found.factors.setdefault(factor["module"], _Factors())
        module_factors.embedding = module_factors.embedding or bool(factor["embedding"])
        if factor["kind"] == "bias":
            module_factors.bias = entry
        elif factor["side"] in "aA":
            module_factors.a = entry
        else:
            module_factors.b = entry
    for module, factors in found.factors.items():
        factors.replacement = found.whole_tensors.pop(f"{module}.weight", None)
    if len(adapters) > 1:
        raise StateError(
            f"the checkpoint has several adapters ({', '.join(sorted(adapters))}): save one of "
            "them alone"
        )
    if not found.factors:
        raise StateError(
            "not a LoRA adapter: no tensor's name ends in lora_A, lora_A.weight or "
            "lora_embedding_A; pass the directory that PEFT saved"
        )
    return found


def _common_prefix_length(
    names: Sequence[str], model_tensors: Mapping[str, TensorEntry], root: str
) -> int:
    """Return the length of the common prefix to remove from names, so that the model has all names.

    Raises:
        MismatchError: no prefix gives names of the model.
    """
    length = 0
    while length < len(names[0]) and all(name[:length] == names[0][:length] for name in names):
        if all(name[length:] in model_tensors for name in names):
            return length
        dot = names[0].find(".", length)
        if dot < 0:
            break
        length = dot + 1
    without_prefix = dict.fromkeys(name.rpartition("base_model.model.")[2] for name in names)
    missing = [name for name in without_prefix if name not in model_tensors] or [*without_prefix]
    raise MismatchError(
        f"the adapter changes tensors that the base does not have below root={root!r}; set root= "
        "to the key of the model in the base:",
        missing,
    )


def _explain_misfit(factors: _Factors, weight: TensorEntry, *, transposed: bool) -> str:
    """Return the reason why factors cannot be added to a weight; empty if they can."""
    a, b = ((each.shape if each is not None else ()) for each in (factors.a, factors.b))
    if not a or not b:
        missing, present = ("A", "B") if not a else ("B", "A")
        return (
            f"the adapter has a factor {present} of this module, but no factor {missing}: save the "
            "adapter again, or copy all of its files"
        )
    if weight.dtype not in FLOATS:
        return f"the weight is {weight.dtype}; supported are {', '.join(FLOATS)}"
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or not a[0]:
        return f"factors of shapes {list(a)} and {list(b)} do not fit each other"
    product = (a[1], b[0]) if transposed else (b[0], a[1])
    base_shape = weight.shape if factors.replacement is None else factors.replacement.shape
    if not product == weight.shape == base_shape:
        return f"the factors multiply to {list(product)}, but the weight is {list(weight.shape)}"
    return ""


def _tie_problems(changes: Mapping[str, Change], base: Manifest) -> Iterator[str]:
    for entry in base.tensors:
        if entry.same_as is not None and (entry.name in changes or entry.same_as in changes):
            yield (
                f"{entry.name} is tied to {entry.same_as}: merging would change both. Save the "
                "base with untied weights, and merge into that"
            )
