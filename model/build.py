"""Build a `transformers` model without weights, and fill modules of it from a checkpoint.

The model is built on the meta device: it has every module and no memory, so that even GLM-5 builds in a second. Only
the few buffers that no checkpoint stores (rotary frequencies) are made real, by the model's own initializer. `fill` is
the one place where tensors on disk meet run-time modules; the layer runner and the loader both use it.

Dimension letters: E experts, N rows (out), K columns (in).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from glm5_quant.model.checkpoint import Checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.families import (
    Family,
    check_experts,
    check_sizes,
    disk_name,
    expert_linears,
    model_config,
    name_prefix,
    read_linear,
)

ALWAYS_FP32 = ("e_score_correction_bias",)  # in BF16, 238 distinct values of GLM-5.2 become 8 and other experts win
STACK = re.compile(r"(?:model\.)?layers\.(?P<layer>\d+)\..*\bexperts\.(?P<part>gate_up_proj|down_proj)")


def build_empty(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """The family's CausalLM on the meta device, non-persistent buffers real (CPU), in eval mode.

    Attention is "sdpa" where the family supports it, else "eager". Nothing of the folder is run. UserError for a config
    that transformers takes and cannot build.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    check_sizes(checkpoint)
    config = model_config(checkpoint.config, file=checkpoint.config_file)
    config.return_dict = True  # transformers' own forward stumbles over its tuples
    attention = "sdpa" if MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_sdpa else "eager"
    try:
        with init_empty_weights(include_buffers=True):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    except Exception as error:  # sizes that no layer can have: whatever it says concerns the user's file
        reason = " ".join(str(error).split())[:300]
        problem = f"no model can be built from this config: {type(error).__name__}: {reason}"
        raise UserError(problem, file=checkpoint.config_file) from error
    _make_buffers(model, checkpoint.config_file)
    return model.eval().requires_grad_(False)


def _make_buffers(model: Any, config_file: Path) -> None:
    """Give buffers that no file holds their values as `from_pretrained` does: by the model's own `_init_weights`.

    UserError for values that are no numbers, as a `rope_theta` below 0 makes them.
    """
    for module in model.modules():
        names = sorted(n for n in module._non_persistent_buffers_set if module._buffers[n] is not None)
        for name in names:
            module._buffers[name] = torch.full_like(module._buffers[name], torch.nan, device="cpu")
        if names:
            with torch.no_grad():
                model._init_weights(module)
        for name in names:
            if module._buffers[name].isnan().any():
                item = f"{type(module).__name__}.{name}"
                raise UserError("no numbers come out of this config", file=config_file, item=item)


def fp32_patterns(model: Any, dtype: torch.dtype) -> tuple[str, ...]:
    """Names that stay float32 in a model of `dtype`, as `from_pretrained` has it."""
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    half = (getattr(model, "_keep_in_fp32_modules", None) or ()) if dtype == torch.float16 else ()
    return (*ALWAYS_FP32, *strict, *half)


def fill(
    module: nn.Module,
    path: str,
    checkpoint: Checkpoint,
    family: Family,
    dtype: torch.dtype,
    *,
    keep_fp32: Iterable[str] = ALWAYS_FP32,
    skip: Callable[[str], bool] = lambda name: False,
) -> None:
    """Give every parameter and stored buffer of `module` its values from disk, in `dtype`.

    `path` is the module's own run-time path in the CausalLM ("" for the whole model, "model.layers.3", "lm_head");
    `skip` takes a full run-time tensor name. Names that match `keep_fp32` become float32. Experts' stacks [E, N, K] are
    put together from 2-D tensors where the checkpoint has those. A tied head shares the embedding.
    UserError listing what the checkpoint lacks, or naming a tensor of another shape.
    """
    prefix, missing = name_prefix(checkpoint), []
    for name, old in module.state_dict(keep_vars=True).items():
        full = f"{path}.{name}" if path else name
        if skip(full):
            continue
        kind = torch.float32 if any(re.search(pattern, full) for pattern in keep_fp32) else dtype
        match = STACK.fullmatch(full)
        if match is not None and family.has_experts:
            value: Tensor | None = _stack(checkpoint, family, int(match["layer"]), match["part"], old, kind)
        else:
            value = _single(checkpoint, family, full, prefix, old, kind, module)
        if value is None:
            missing.append(full)
        else:
            _assign(module, name, value)
    _refuse_missing(checkpoint, missing)


def generation_config(folder: Path) -> Any | None:
    """The folder's own generation settings, as `from_pretrained` takes them (several end tokens, for example)."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return None
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"not usable: {error}", file=file) from None


def check_parameters(checkpoint: Checkpoint, family: Family) -> None:
    """Raise what `fill` would raise of the whole model's names and shapes, from headers alone: no tensor is read; and
    what generation settings would stop it.

    Takes a source, or an export's `plain_view`.
    """
    generation_config(checkpoint.folder)
    model = build_empty(checkpoint, checkpoint.dtype)
    prefix, missing, has_stacks = name_prefix(checkpoint), [], False
    for full, old in model.state_dict(keep_vars=True).items():
        if family.has_experts and STACK.fullmatch(full):
            has_stacks = True
        elif _source(checkpoint, family, full, prefix, old) is None:
            missing.append(full)
    _refuse_missing(checkpoint, missing)
    if has_stacks:
        check_experts(checkpoint, family)


def _refuse_missing(checkpoint: Checkpoint, missing: list[str]) -> None:
    if missing:
        raise UserError(f"{len(missing)} tensors are not in the checkpoint", file=checkpoint.folder, item=missing[0])


def _single(
    checkpoint: Checkpoint, family: Family, full: str, prefix: str, old: Tensor, dtype: torch.dtype, module: nn.Module
) -> Tensor | None:
    if full == "lm_head.weight" and disk_name(checkpoint, family, full, prefix=prefix) is None and _is_tied(checkpoint):
        embedding = dict(module.named_parameters(remove_duplicate=False)).get("model.embed_tokens.weight")
        if embedding is not None:
            return embedding
    source = _source(checkpoint, family, full, prefix, old)
    return None if source is None else checkpoint.read(source, dtype if old.is_floating_point() else None)


def _source(checkpoint: Checkpoint, family: Family, full: str, prefix: str, old: Tensor) -> str | None:
    """The tensor on disk of a parameter, of its shape; a tied head's is the embedding. None where there is none."""
    source = disk_name(checkpoint, family, full, prefix=prefix)
    if source is None and full == "lm_head.weight" and _is_tied(checkpoint):
        source = disk_name(checkpoint, family, "model.embed_tokens.weight", prefix=prefix)
    if source is None:
        return None
    info = checkpoint.tensors[source]
    if info.shape != tuple(old.shape):
        raise UserError(
            "a tensor does not fit the model that the config describes",
            file=info.file,
            item=source,
            found=list(info.shape),
            expected=list(old.shape),
        )
    return source


def _is_tied(checkpoint: Checkpoint) -> bool:
    return bool(model_config(checkpoint.config, file=checkpoint.config_file).tie_word_embeddings)


def _stack(checkpoint: Checkpoint, family: Family, layer: int, part: str, old: Tensor, dtype: torch.dtype) -> Tensor:
    """Experts' stack [E, N, K]: gate rows above up rows, or down."""
    out_ENK = torch.empty(old.shape, dtype=dtype)
    for linear in expert_linears(checkpoint, family, layer):
        if (linear.role == "down") == (part == "down_proj"):
            first = linear.n if linear.role == "up" else 0
            out_ENK[linear.expert, first : first + linear.n] = read_linear(checkpoint, linear, dtype)
    return out_ENK


def _assign(module: nn.Module, name: str, value: Tensor) -> None:
    parent_path, _, leaf = name.rpartition(".")
    parent = module.get_submodule(parent_path)
    if leaf in parent._parameters:
        kept = value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False)
        parent._parameters[leaf] = kept
    else:
        parent._buffers[leaf] = value
