"""The `quantization_config` of an export: what compressed-tensors, vLLM, SGLang and transformers read, made and parsed.

One config group targets every `Linear`; a second names the modules stored in 8 bits, where there are any; the ignore
list names exactly the modules whose 2-D weight is stored unpacked
(routers, `kv_b_proj`, indexers, embeddings, head, the MTP layer), because servers build a packed module for each
linear that is not listed. A tied head is listed too: it has no tensor of its own, but readers build it as a linear.

Codes that are right only for rotated or rescaled inputs are stored under a format name of our own, in the scheme and in
its group: every reader of `pack-quantized` then stops with an error instead of computing nonsense (docs/decisions).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from glm5_quant.model.errors import UserError

KEY = "quantization_config"
STALE_KEYS = (KEY, "compression_config")
FORMAT = "pack-quantized"
OWN_FORMAT = "eampq-pack-quantized"
INPUTS_KEY = "eampq_inputs"
SCHEME = "eampq"
SCHEME_KEY = "int4_quantization_scheme"
NUMERIC_KEY = "protect_numeric_tokens"


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Weights(_Record):
    num_bits: Literal[4, 8]
    type: Literal["int"] = "int"
    strategy: Literal["group"]
    group_size: int = Field(gt=0)
    symmetric: bool
    dynamic: Literal[False] = False


class InputScheme(BaseModel):
    """What a runtime does to the inputs of every packed matrix before the dot, first the rotation, then the rounding.

    rotation "full": the orthonormal 64-point Hadamard transform on each aligned block of 64 input channels (quant/
    rotation.py); codes are of W R. activations: a format of quant/activation.py; with "int4-channel" codes are of
    W diag(a), or of W R diag(a), and a is in the sidecar.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    rotation: Literal["none", "full"] = "none"
    activations: Literal["none", "int8", "int4-channel", "int4-block"] = "none"

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any], *, file: Path) -> InputScheme:
        """From a journal's settings. A folded rotation is in the weights already and asks nothing of the runtime.

        Raises:
            UserError: a name that this package does not know.
        """
        quant, rotation = _quant(settings), rotation_of(settings)
        values = {"rotation": "none" if rotation == "folded" else rotation}
        try:
            return cls.model_validate(values | {"activations": quant.get("activations") or "none"})
        except ValidationError as error:
            first = error.errors()[0]
            item = f"settings.quant.{first['loc'][0]}"
            raise UserError("unknown setting", file=file, item=item, found=first["input"]) from None

    @property
    def plain(self) -> bool:
        """Whether inputs are taken as they are."""
        return self == InputScheme()

    @property
    def changes_weights(self) -> bool:
        """Whether codes are wrong for a reader that takes inputs as they are."""
        return self.rotation == "full" or self.activations == "int4-channel"


def rotation_of(settings: Mapping[str, Any]) -> str:
    """The rotation that a journal's settings name, "none" where they name none."""
    return str(_quant(settings).get("rotation") or "none")


def _quant(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    quant = settings.get("quant", settings)
    return quant if isinstance(quant, Mapping) else {}


class _Group(_Record):
    targets: list[str]
    format: Literal["pack-quantized", "eampq-pack-quantized"] | None = None
    weights: _Weights
    input_activations: None = None
    output_activations: None = None


class _PackQuantized(_Record):
    quant_method: Literal["compressed-tensors"]
    format: Literal["pack-quantized", "eampq-pack-quantized"]
    config_groups: dict[str, _Group] = Field(min_length=1, max_length=2)
    ignore: list[str] = []
    eampq_inputs: InputScheme = InputScheme()


class Scheme(_Record):
    """How an export stores its quantized matrices: asymmetric or not, inputs a block, modules stored unpacked, and what
    the codes expect to be done to their inputs.

    Modules of `eight` are stored in 8 bits, symmetric, in blocks of the same size, and take inputs as they are.
    """

    symmetric: bool
    group_size: int
    ignore: list[str]
    inputs: InputScheme = InputScheme()
    eight: list[str] = []


def quantization_config(scheme: Scheme) -> dict[str, Any]:
    """The dictionary that goes into config.json."""
    own = scheme.inputs.changes_weights
    # Readers look for a module's own name before its class, so the group that names modules wins.
    groups = {"group_0": _group(scheme, ["Linear"], 4)}
    if scheme.eight:
        groups["group_1"] = _group(scheme, scheme.eight, 8)
    return {
        "quant_method": "compressed-tensors",
        "format": OWN_FORMAT if own else FORMAT,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": scheme.ignore,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        **({} if scheme.inputs.plain else {INPUTS_KEY: scheme.inputs.model_dump()}),
    }


def _group(scheme: Scheme, targets: list[str], bits: int) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": scheme.symmetric or bits == 8,
        "strategy": "group",
        "group_size": scheme.group_size,
        "dynamic": False,
    }
    group = {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}
    return group | ({"format": OWN_FORMAT} if scheme.inputs.changes_weights else {})


def export_config(source: dict[str, Any], scheme: Scheme, *, protect_numeric: bool, untie: bool) -> dict[str, Any]:
    """config.json of an export: every key of the source kept but its own quantization, then ours.

    A quantization entry of the source (FP8) would make readers take our tensors for FP8, so it goes at any depth.
    `untie` says that the head has weights of its own now.
    """
    config = without_quantization(untied_config(source) if untie else source)
    config[SCHEME_KEY] = SCHEME
    config[NUMERIC_KEY] = protect_numeric
    config[KEY] = quantization_config(scheme)
    return config


def untied_config(config: dict[str, Any]) -> dict[str, Any]:
    """A deep copy of a model config whose head no longer shares the embedding's matrix."""
    copied = copy.deepcopy(config)
    for part in _nested(copied):
        if "tie_word_embeddings" in part:
            part["tie_word_embeddings"] = False
    return copied | {"tie_word_embeddings": False}


def without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """A deep copy of a model config without any quantization entry, whether at the top or in `text_config`."""
    copied = copy.deepcopy(config)
    for part in _nested(copied):
        for key in STALE_KEYS:
            part.pop(key, None)
    return copied


def read_scheme(config: dict[str, Any], *, file: Path) -> Scheme | None:
    """The scheme of an export's config; None where the model is not quantized by this format.

    Raises:
        UserError: config.json says pack-quantized, or our own variant of it, in a form this package does not compute.
    """
    found = config.get(KEY)
    if not isinstance(found, dict) or found.get("quant_method") != "compressed-tensors":
        return None
    try:
        parsed = _PackQuantized.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        item = ".".join([KEY, *(str(part) for part in first["loc"])])
        raise UserError(
            "quantization that this package does not compute", file=file, item=item, found=first["msg"]
        ) from None
    group, *others = parsed.config_groups.values()
    for item, fault in _group_faults(parsed.config_groups):
        item = f"{KEY}.config_groups.{item}"
        raise UserError("quantization that this package does not compute", file=file, item=item, found=fault)
    inputs = parsed.eampq_inputs
    formats = {parsed.format, *(one.format or parsed.format for one in (group, *others))}
    expected = OWN_FORMAT if inputs.changes_weights else FORMAT
    if formats != {expected}:
        raise UserError(
            "the format's name and what the codes expect of their inputs disagree",
            file=file,
            item=f"{KEY}.format",
            found=", ".join(sorted(formats)),
            expected=f"{expected}, since {INPUTS_KEY} is {inputs.model_dump()}",
        )
    weights = group.weights
    return Scheme(
        symmetric=weights.symmetric,
        group_size=weights.group_size,
        ignore=parsed.ignore,
        inputs=inputs,
        eight=[name for one in others for name in one.targets],
    )


def _group_faults(groups: Mapping[str, _Group]) -> Iterator[tuple[str, str]]:
    """What keeps config groups from being ours: INT4 for every linear, symmetric INT8 for some named modules."""
    (first, four), *others = groups.items()
    if four.weights.num_bits != 4:
        yield f"{first}.weights.num_bits", f"{four.weights.num_bits} bits for every linear"
    for name, eight in others:
        if eight.weights.num_bits != 8 or not eight.weights.symmetric:
            yield f"{name}.weights", "no symmetric INT8"
        if eight.weights.group_size != four.weights.group_size:
            yield f"{name}.weights.group_size", f"{eight.weights.group_size} beside {four.weights.group_size}"
        if any(target == "Linear" or target.startswith("re:") for target in eight.targets):
            yield f"{name}.targets", "not the names of modules"


def _nested(config: dict[str, Any]) -> list[dict[str, Any]]:
    found = [config]
    for value in config.values():
        if isinstance(value, dict):
            found += _nested(value)
    return found
