"""The `quantization_config` of an export: what compressed-tensors, vLLM, SGLang and transformers read, made and parsed.

One config group targets every `Linear`; the ignore list names exactly the modules whose 2-D weight is stored unpacked
(routers, `kv_b_proj`, indexers, embeddings, head, the MTP layer), because servers build a packed module for each
linear that is not listed. A tied head is listed too: it has no tensor of its own, but readers build it as a linear.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from glm5_quant.model.errors import UserError

KEY = "quantization_config"
STALE_KEYS = (KEY, "compression_config")
FORMAT = "pack-quantized"
SCHEME = "eampq"
SCHEME_KEY = "int4_quantization_scheme"
NUMERIC_KEY = "protect_numeric_tokens"


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Weights(_Record):
    num_bits: Literal[4]
    type: Literal["int"] = "int"
    strategy: Literal["group"]
    group_size: int = Field(gt=0)
    symmetric: bool
    dynamic: Literal[False] = False


class _Group(_Record):
    targets: list[str]
    weights: _Weights
    input_activations: None = None
    output_activations: None = None


class _PackQuantized(_Record):
    quant_method: Literal["compressed-tensors"]
    format: Literal["pack-quantized"]
    config_groups: dict[str, _Group] = Field(min_length=1, max_length=1)
    ignore: list[str] = []


class Scheme(_Record):
    """How an export stores its quantized matrices: asymmetric or not, inputs a block, modules stored unpacked."""

    symmetric: bool
    group_size: int
    ignore: list[str]


def quantization_config(scheme: Scheme) -> dict[str, Any]:
    """The dictionary that goes into config.json."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "group",
        "group_size": scheme.group_size,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": scheme.ignore,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def export_config(source: dict[str, Any], scheme: Scheme, *, protect_numeric: bool, untie: bool) -> dict[str, Any]:
    """config.json of an export: every key of the source kept but its own quantization, then ours.

    A quantization entry of the source (FP8) would make readers take our tensors for FP8, so it goes at any depth.
    `untie` says that the head has weights of its own now.
    """
    config = without_quantization(source)
    if untie:
        for part in _nested(config):
            if "tie_word_embeddings" in part:
                part["tie_word_embeddings"] = False
        config["tie_word_embeddings"] = False
    config[SCHEME_KEY] = SCHEME
    config[NUMERIC_KEY] = protect_numeric
    config[KEY] = quantization_config(scheme)
    return config


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
        UserError: config.json says pack-quantized in a form that this package does not compute.
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
    (group,) = parsed.config_groups.values()
    return Scheme(symmetric=group.weights.symmetric, group_size=group.weights.group_size, ignore=parsed.ignore)


def _nested(config: dict[str, Any]) -> list[dict[str, Any]]:
    found = [config]
    for value in config.values():
        if isinstance(value, dict):
            found += _nested(value)
    return found
