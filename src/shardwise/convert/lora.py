"""Match the tensors of a LoRA adapter with those of its base model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shardwise.errors import FormatError, MismatchError, StateError
from shardwise.manifest.manifest import Manifest, TensorEntry

FLOATS = ("float16", "bfloat16", "float32", "float64")
HARMLESS_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that do not change the base."""
VARIANTS = (
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
"""Settings of PEFT whose adapters are not simply two factors for each weight."""
_FACTOR = re.compile(
    r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[aAbB])"
    r"(?:\.(?P<adapter>(?!weight$|bias$)[^.]+))?(?:\.(?P<kind>weight|bias))?"
)
_WHOLE = re.compile(r"(?P<module>.+)\.modules_to_save\.[^.]+\.(?P<rest>.+)")
_PLAIN_PATTERN = re.compile(r"\^?[\w.]+")


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
        """Return the alpha of a module, given its name in the model.

        Raises:
            StateError: `alpha_pattern` has a regular expression that is not a plain name.
        """
        for pattern, alpha in self.alpha_pattern.items():
            if not _PLAIN_PATTERN.fullmatch(pattern):
                raise StateError(
                    f"adapter_config.json: alpha_pattern {pattern!r} is not a plain module name, "
                    "which is all that can be merged"
                )
            whole = pattern.removeprefix("^")
            if module == whole or (whole == pattern and module.endswith(f".{pattern}")):
                return alpha
        return self.lora_alpha


def decode_config(data: bytes, place: str) -> AdapterConfig:
    """Decode `adapter_config.json`.

    Raises:
        FormatError: it is malformed.
        StateError: this kind of adapter cannot be merged.
    """
    try:
        raw = msgspec.json.decode(data, type=dict[str, Any])
        config = msgspec.convert(raw, AdapterConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{place}: {error}") from error
    used = [f"{name}={raw[name]!r:.60}" for name in VARIANTS if raw.get(name)]
    if config.peft_type != "LORA":
        used.append(f"peft_type={config.peft_type!r}")
    if config.init_lora_weights not in HARMLESS_STARTS:
        used.append(
            f"init_lora_weights={config.init_lora_weights!r}, which changed the base (save it "
            "with path_initial_model_for_weight_conversion)"
        )
    if used:
        raise StateError(
            f"{place}: only plain LoRA can be merged, but this adapter uses {', '.join(used)}"
        )
    return config


@dataclass(frozen=True, slots=True)
class LowRank:
    """An addition to a weight: `scaling` × (`b` @ `a`), transposed if the weight is (in, out).

    `base` is the adapter's own copy of the weight, which adapters of embeddings can have.
    """

    a: str
    b: str
    rank: int
    scaling: float
    transposed: bool
    base: str | None


@dataclass(frozen=True, slots=True)
class Bias:
    """An addition to a bias: `scaling` × the adapter's tensor."""

    name: str
    scaling: float


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor of the adapter that replaces the base's."""

    name: str


Change = LowRank | Bias | Whole


@dataclass(slots=True)
class _Factors:
    """The adapter's tensors for one module."""

    a: TensorEntry | None = None
    b: TensorEntry | None = None
    bias: TensorEntry | None = None
    base: TensorEntry | None = None
    embedding: bool = False


@dataclass(slots=True)
class _Found:
    """The adapter's tensors: factors by module, and whole tensors by name."""

    factors: dict[str, _Factors] = field(default_factory=dict)
    whole: dict[str, TensorEntry] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Return the names of the weights that change."""
        return [*(f"{module}.weight" for module in self.factors), *self.whole]


def changes(
    adapter: Manifest,
    base: Manifest,
    root: str,
    config: AdapterConfig | None,
    alpha: float | None,
) -> dict[str, Change]:
    """Return the changes that an adapter makes, by the names of the base's tensors.

    Args:
        root: the name below which the base's model is; "" for all names.
        alpha: the LoRA alpha, in place of the configured one.

    Raises:
        MismatchError: names or shapes do not fit; `problems` lists them all.
        StateError: the tensors are not an adapter, or it cannot be merged.
    """
    if config is None and alpha is None:
        raise StateError(
            "the adapter has no adapter_config.json: give its LoRA alpha with alpha= "
            "(on the command line --alpha)"
        )
    found = _parsed(adapter.tensors)
    start = f"{root}." if root else ""
    there = {e.name.removeprefix(start): e for e in base.tensors if e.name.startswith(start)}
    cut = _prefix(found.names(), there, root)
    made: dict[str, Change] = {}
    problems: list[str] = []
    for name, factors in found.factors.items():
        module = name[cut:]
        try:
            made |= _of_module(module, factors, there, config, alpha)
        except MismatchError as error:
            problems.append(f"{module}: {error.summary}")
    for name, entry in found.whole.items():
        target = there[name[cut:]]
        if target.shape != entry.shape:
            shapes = f"shape {list(entry.shape)} in the adapter, {list(target.shape)} in the base"
            problems.append(f"{name[cut:]}: {shapes}")
        made[target.name] = Whole(entry.name)
    problems += _tied(made, base)
    if problems:
        raise MismatchError("the adapter does not fit the base:", problems)
    return made


def _of_module(
    module: str,
    factors: _Factors,
    there: Mapping[str, TensorEntry],
    config: AdapterConfig | None,
    alpha: float | None,
) -> dict[str, Change]:
    """Return the changes that an adapter makes to one module.

    Raises:
        MismatchError: the factors do not fit the module.
    """
    weight, bias = there[f"{module}.weight"], there.get(f"{module}.bias")
    transposed = factors.embedding or (config is not None and config.fan_in_fan_out)
    problem = _misfit(factors, weight, transposed=transposed)
    if problem or factors.a is None or factors.b is None:
        raise MismatchError(problem, [])
    rank = factors.a.shape[0]
    if config is not None and not config.rank_pattern and rank != config.r:
        raise MismatchError(f"the rank is {rank}, but adapter_config.json has r={config.r}", [])
    own = alpha if alpha is not None else config.alpha_of(module) if config is not None else 0.0
    scaling = own / (math.sqrt(rank) if config is not None and config.use_rslora else rank)
    base = None if factors.base is None else factors.base.name
    a, b = factors.a.name, factors.b.name
    made: dict[str, Change] = {weight.name: LowRank(a, b, rank, scaling, transposed, base)}
    if factors.bias is not None:
        if bias is None or bias.shape != factors.bias.shape:
            raise MismatchError(
                "the adapter changes its bias, but the base has no bias of that shape", []
            )
        made[bias.name] = Bias(factors.bias.name, scaling)
    return made


def _parsed(tensors: Sequence[TensorEntry]) -> _Found:
    found = _Found()
    adapters: set[str] = set()
    for entry in tensors:
        factor = _FACTOR.fullmatch(entry.name)
        if factor is None:
            if "lora_" in entry.name:
                raise StateError(
                    f"{entry.name}: cannot be merged; supported are lora_A and lora_B of linear "
                    "layers and embeddings, and whole tensors (modules_to_save)"
                )
            whole = _WHOLE.fullmatch(entry.name)
            name = f"{whole['module']}.{whole['rest']}" if whole else entry.name
            found.whole[name.replace(".base_layer.", ".")] = entry
            continue
        adapters.add(factor["adapter"] or "")
        own = found.factors.setdefault(factor["module"], _Factors())
        own.embedding = own.embedding or bool(factor["embedding"])
        if factor["kind"] == "bias":
            own.bias = entry
        elif factor["side"] in "aA":
            own.a = entry
        else:
            own.b = entry
    for module, factors in found.factors.items():
        factors.base = found.whole.pop(f"{module}.weight", None)
    if len(adapters) > 1:
        raise StateError(
            f"there are several adapters ({', '.join(sorted(adapters))}): save one of them alone"
        )
    if not found.factors:
        raise StateError(
            "not an adapter: no name ends in lora_A, lora_A.weight or lora_embedding_A"
        )
    return found


def _prefix(names: Sequence[str], there: Mapping[str, TensorEntry], root: str) -> int:
    """Return the length of the prefix that all names have, and the base's names do not.

    Raises:
        MismatchError: there is no such prefix.
    """
    at = 0
    while at < len(names[0]) and all(name[:at] == names[0][:at] for name in names):
        if all(name[at:] in there for name in names):
            return at
        dot = names[0].find(".", at)
        if dot < 0:
            break
        at = dot + 1
    ends = {name.rpartition("base_model.model.")[2]: name for name in names}
    lost = [end for end in ends if end not in there] or [*ends]
    raise MismatchError(
        f"the base has no tensors of these names below {root!r}, which the adapter changes; set "
        "root= to the key of the model in the base:",
        lost,
    )


def _misfit(factors: _Factors, weight: TensorEntry, *, transposed: bool) -> str:
    """Return why factors cannot be added to a weight; empty if they can."""
    a, b = ((each.shape if each is not None else ()) for each in (factors.a, factors.b))
    if not a or not b:
        return "one of the two factors is missing"
    if weight.dtype not in FLOATS:
        return f"the weight is {weight.dtype}; supported are {', '.join(FLOATS)}"
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or not a[0]:
        return f"factors of shapes {list(a)} and {list(b)} do not fit each other"
    product = (a[1], b[0]) if transposed else (b[0], a[1])
    own = weight.shape if factors.base is None else factors.base.shape
    if not product == weight.shape == own:
        return f"the factors multiply to {list(product)}, but the weight is {list(weight.shape)}"
    return ""


def _tied(made: Mapping[str, Change], base: Manifest) -> Iterator[str]:
    for entry in base.tensors:
        if entry.same_as is not None and (entry.name in made or entry.same_as in made):
            yield f"{entry.name} is tied to {entry.same_as}: merging would change both"
