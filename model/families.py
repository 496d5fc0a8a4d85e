"""Model families as rows of data: which weights are quantized, what they are called, what belongs together.

`model_type` decides, never the shape of a tensor. What a row does not name stays in source precision: routers, their
correction bias, `shared_expert_gate`, norms, `kv_b_proj`, the sparse-attention indexer, embeddings, head, MTP layers.
Sizes come from the family's own `transformers` config class, so defaults left out of config.json are the right ones.

Dimension letters: E experts, N rows (out), K columns (in), D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5_quant.model.checkpoint import DTYPES, Checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.fp8 import WEIGHT_DTYPES, check_left_over, quantization_config
from glm5_quant.model.routing import check_routing

Groups = tuple[tuple[str, ...], ...]

# Linears that read the same input share a group: one Hessian, one scheme, because servers fuse them into one matrix.
GQA: Groups = (("q_proj", "k_proj", "v_proj"), ("o_proj",))
MLA: Groups = (("q_a_proj", "q_proj", "kv_a_proj_with_mqa"), ("q_b_proj",), ("o_proj",))
SPLIT_MLP: Groups = (("gate_proj", "up_proj"), ("down_proj",))
FUSED_MLP: Groups = (("gate_up_proj",), ("down_proj",))
ROLES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "gate_up_proj": "gate_up"}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row. Paths are inside a decoder layer; `block` is where the MLP or MoE block sits.

    `sparse` says which layers hold experts: "none", "all", "types" (`mlp_layer_types`), "first_k"
    (`first_k_dense_replace`) or "step" (`decoder_sparse_step`, `mlp_only_layers`).
    `renames` are (run-time, on-disk) pieces of tensor names. `parts` are the checkpoint's names of an expert's gate,
    up and down matrices; `fused` the names of the stacks [E, 2I, D] (gate rows first) and [E, D, I] inside the block.
    `side` is the keyword under which a layer's second output goes into the next layer.
    `stream_readers` are modules outside what is quantized that read the residual stream, each with the norm whose
    output it reads; the router of an MoE block is one without being named. `unrotatable` says why the stream of this
    family cannot be rotated inside the weights (model/rotated.py). `adds_plainly`: outputs of attention and MLP are
    added to the residual stream as they are, without a norm, gate or factor of the layer's.
    """

    model_type: str
    attention_path: str = "self_attn"
    attention: Groups = GQA
    block: str = "mlp"
    disk_block: str = "mlp"
    dense: Groups = SPLIT_MLP
    sparse: str = "none"
    router: str = "gate"
    experts: str = "experts"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    fused: tuple[tuple[str, str], ...] = (("experts.gate_up_proj", "experts.down_proj"),)
    shared: str | None = None
    shared_count: str | None = None
    side: str | None = None
    free_heads: bool = False
    stream_readers: tuple[tuple[str, str], ...] = ()
    unrotatable: str | None = None
    adds_plainly: bool = True
    renames: tuple[tuple[str, str], ...] = ()

    @property
    def has_experts(self) -> bool:
        return self.sparse != "none"


_GLM: dict[str, Any] = {"shared": "shared_experts", "shared_count": "n_shared_experts"}

FAMILIES: dict[str, Family] = {
    row.model_type: row
    for row in (
        Family(
            model_type="glm_moe_dsa",
            attention=MLA,
            sparse="types",
            side="prev_topk_indices",
            stream_readers=tuple(("input_layernorm", f"self_attn.indexer.{x}") for x in ("wk", "weights_proj")),
            **_GLM,
        ),
        Family(model_type="glm4_moe", sparse="first_k", **_GLM),
        Family(model_type="glm4_moe_lite", attention=MLA, sparse="types", **_GLM),
        Family(model_type="deepseek_v3", attention=MLA, sparse="first_k", **_GLM),
        Family(model_type="deepseek_v2", attention=MLA, sparse="first_k", **_GLM),
        Family(model_type="qwen3_moe", sparse="step"),
        Family(
            model_type="qwen2_moe",
            sparse="step",
            shared="shared_expert",
            adds_plainly=False,
            stream_readers=(("post_attention_layernorm", "mlp.shared_expert_gate"),),
        ),
        Family(
            model_type="mixtral",
            sparse="all",
            disk_block="block_sparse_moe",
            parts=("w1", "w3", "w2"),
            renames=((".mlp.", ".block_sparse_moe."),),
        ),
        Family(model_type="olmoe", sparse="all"),
        Family(
            model_type="granitemoe",
            sparse="all",
            block="block_sparse_moe",
            disk_block="block_sparse_moe",
            router="router",
            adds_plainly=False,
            fused=(("input_linear", "output_linear"), ("experts.gate_up_proj", "experts.down_proj")),
            renames=((".router.weight", ".router.layer.weight"),),
        ),
        Family(
            model_type="glm5_ref",
            sparse="all",
            side="prev_expert_index",
            free_heads=True,
            unrotatable="its routers normalise their input by a LayerNorm, which takes the mean over channels off",
        ),
        Family(model_type="llama"),
        Family(model_type="qwen2"),
        Family(model_type="qwen3"),
        Family(
            model_type="glm4",
            dense=FUSED_MLP,
            adds_plainly=False,
            unrotatable="norms with gains lie between the attention's and the MLP's outputs and the stream",
        ),
    )
}


@dataclass(frozen=True)
class Linear:
    """One matrix [n, k] to quantize.

    `name`: module name as a checkpoint with 2-D experts spells it, without ".weight". `source`: the tensor on disk.
    `slice`: (entry of a fused stack or None, first row, row behind the last). `group`: linears with the same value read
    the same input and share one scheme. `module`: run-time path inside the decoder layer ("mlp.experts" for experts).
    """

    name: str
    layer: int
    role: str
    expert: int | None
    shared: bool
    n: int
    k: int
    source: str
    slice: tuple[int | None, int, int]
    group: str
    module: str


def family_of(config: Mapping[str, Any], *, file: Path | str | None = None) -> Family:
    """The row of a config's `model_type`. UserError listing the known ones."""
    found = config.get("model_type")
    if not isinstance(found, str) or found not in FAMILIES:
        raise UserError(
            "unknown model type",
            file=file,
            item="model_type",
            found=repr(found),
            expected="one of " + ", ".join(FAMILIES),
        )
    return FAMILIES[found]


def model_config(config: Mapping[str, Any], *, file: Path | str | None = None) -> Any:
    """The `transformers` config object of a config.json: defaults filled in, values checked. Runs none of its code."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = family_of(config, file=file)
    if family.model_type == "glm5_ref":
        from glm5_quant.model.glm5 import register

        register()
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    try:
        made = CONFIG_MAPPING[family.model_type].from_dict(plain)
        experts = expert_count(made) if family.has_experts else 0
    except Exception as error:  # the class checks its values; whatever it says concerns the user's file
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"transformers refuses this config: {type(error).__name__}: {reason}", file=file) from error
    check_routing(made, experts, file=file)
    return made


_EXPERT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")
_ENOUGH_MISSING = 10_000
PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")


def name_prefix(checkpoint: Checkpoint) -> str:
    """What stands before `layers.N.` on disk. UserError when there are no decoder layers, or two sets of them."""
    found = [p for p in PREFIXES if any(name.startswith(f"{p}layers.0.") for name in checkpoint.tensors)]
    if len(found) != 1:
        raise UserError(
            "no decoder layers found" if not found else "decoder layers stored under two names",
            file=checkpoint.folder,
            found=", ".join(f"{p}layers.0." for p in found) or next(iter(checkpoint.tensors)),
            expected=" or ".join(f"{p}layers.0.*" for p in PREFIXES),
        )
    return found[0]


def disk_name(checkpoint: Checkpoint, family: Family, tensor: str, *, prefix: str | None = None) -> str | None:
    """Name on disk of a run-time tensor ("model.layers.3.mlp.gate.weight"), or None when the folder does not hold it.

    The one place where run-time names become names on disk; experts' stacks come from `expert_linears`.
    """
    prefix = name_prefix(checkpoint) if prefix is None else prefix
    candidates = [prefix + tensor.removeprefix("model.")] if tensor.startswith("model.") else []
    candidates += [] if candidates else [tensor, prefix.removesuffix("model.") + tensor]
    for runtime, disk in family.renames:
        candidates = [name.replace(runtime, disk) for name in candidates] + candidates
    return next((name for name in candidates if name in checkpoint.tensors), None)


def is_sparse(family: Family, config: Any, layer: int) -> bool:
    """Whether a decoder layer holds routed experts. `config`: the object of `model_config`."""
    if family.sparse in ("none", "all"):
        return family.sparse == "all"
    if family.sparse == "types":
        return bool(config.mlp_layer_types[layer] == "sparse")
    if family.sparse == "first_k":
        return bool(layer >= config.first_k_dense_replace)
    step = config.decoder_sparse_step
    return layer not in (config.mlp_only_layers or []) and expert_count(config) > 0 and (layer + 1) % step == 0


def expert_count(config: Any) -> int:
    """Routed experts of a MoE layer, whatever the config calls them."""
    return next((int(getattr(config, key)) for key in _EXPERT_KEYS if getattr(config, key, None) is not None), 0)


def check_sizes(checkpoint: Checkpoint) -> None:
    """Refuse counts of layers and experts that the tensors there are cannot make, before anything loops over them."""
    tensors = checkpoint.tensors
    stacks = max((info.shape[0] for info in tensors.values() if len(info.shape) == 3), default=0)
    limits = {"num_hidden_layers": len(tensors), **dict.fromkeys(_EXPERT_KEYS, max(len(tensors), stacks))}
    for key, limit in limits.items():
        count = checkpoint.config.get(key)
        if isinstance(count, int) and count > limit:
            raise UserError(
                "more than the weights of this checkpoint can make",
                file=checkpoint.config_file,
                item=key,
                found=f"{count:,}",
                expected=f"{limit:,} at most, for {len(tensors):,} tensors",
                hint="config.json is damaged or belongs to another model",
            )


def linears(checkpoint: Checkpoint, family: Family) -> list[Linear]:
    """What is quantized by default, in the order of the computation, each found on disk with the shape the config says.

    UserError when weights are missing or of another shape, when no expert is found, or when the source is INT4 already.
    """
    _refuse_unreadable(checkpoint)
    refuse_quantized(checkpoint)
    check_left_over(checkpoint.tensors)
    finder = _Finder(checkpoint, family)
    result: list[Linear] = []
    for layer in range(finder.config.num_hidden_layers):
        result += finder.layer(layer)
        if len(finder.missing) > max(len(checkpoint.tensors), _ENOUGH_MISSING):
            break
    finder.check_missing()
    return result


def expert_linears(checkpoint: Checkpoint, family: Family, layer: int) -> list[Linear]:
    """The routed experts' matrices of one layer: for each expert gate, up, down. Empty for a dense layer."""
    finder = _Finder(checkpoint, family)
    found = list(finder.experts(layer)) if is_sparse(family, finder.config, layer) else []
    finder.check_missing()
    return found


def check_experts(checkpoint: Checkpoint, family: Family) -> None:
    """Raise what `expert_linears` would raise for any layer, without looking for what else is quantized."""
    finder = _Finder(checkpoint, family)
    for layer in range(finder.config.num_hidden_layers):
        if is_sparse(family, finder.config, layer):
            for _ in finder.experts(layer):
                pass
    finder.check_missing()


def read_linear(checkpoint: Checkpoint, linear: Linear, dtype: torch.dtype | None = None) -> Tensor:
    """The matrix [n, k] of a linear, from its own tensor or from its rows of a fused stack."""
    index, start, stop = linear.slice
    return checkpoint.read_slice(linear.source, index, start, stop, dtype)


def mtp_tensors(checkpoint: Checkpoint, family: Family) -> list[str]:
    """Tensors of multi-token-prediction layers, which transformers never builds; an export copies them as they are."""
    check_sizes(checkpoint)
    prefix = name_prefix(checkpoint)
    first = int(model_config(checkpoint.config, file=checkpoint.config_file).num_hidden_layers)

    def is_mtp(name: str) -> bool:
        number = name.removeprefix(f"{prefix}layers.").split(".")[0]
        extra = name.startswith(f"{prefix}layers.") and number.isdecimal() and int(number) >= first
        return extra or name.startswith(("mtp.", f"{prefix}mtp."))

    return [name for name in checkpoint.tensors if is_mtp(name)]


def _refuse_unreadable(checkpoint: Checkpoint) -> None:
    for info in checkpoint.tensors.values():
        if info.dtype not in DTYPES:
            raise UserError("values of this dtype cannot be read", file=info.file, item=info.name, found=info.dtype)


def refuse_quantized(checkpoint: Checkpoint) -> None:
    """Raise UserError where the weights are packed INT4 already: GPTQ's, AWQ's, compressed-tensors' or our own."""
    method = quantization_config(checkpoint.config).get("quant_method")
    if method is None or any(info.dtype in WEIGHT_DTYPES for info in checkpoint.tensors.values()):
        return
    if method == "fp8" or not any(name.endswith((".weight_packed", ".qweight")) for name in checkpoint.tensors):
        return  # settings without their tensors: the weights are plain, and are read as what they are
    raise UserError(
        "this model is quantized already",
        file=checkpoint.config_file,
        item="quantization_config",
        found=method,
        expected="BF16, FP16, FP32 or FP8 weights",
        hint="Start from the original model",
    )


class _Finder:
    """Collects the linears of a checkpoint, remembering what is missing so that one message can tell all of it."""

    def __init__(self, checkpoint: Checkpoint, family: Family) -> None:
        self.checkpoint, self.family = checkpoint, family
        self.prefix = name_prefix(checkpoint)
        check_sizes(checkpoint)
        self.config = model_config(checkpoint.config, file=checkpoint.config_file)
        self.missing: list[str] = []
        self.expert_total = self.total = 0

    def layer(self, layer: int) -> Iterator[Linear]:
        family = self.family
        yield from self._attention(layer)
        if not is_sparse(family, self.config, layer):
            width = self.config.intermediate_size
            yield from self._mlp(layer, family.block, family.dense, width)
            return
        if family.shared is not None:
            yield from self._mlp(layer, f"{family.block}.{family.shared}", SPLIT_MLP, self._shared_width(), shared=True)
        yield from self.experts(layer)

    def _attention(self, layer: int) -> Iterator[Linear]:
        shapes = _attention_shapes(self.config, self.family)
        for names in self.family.attention:
            present = [name for name in names if name in shapes]
            for name in present:
                module = f"{self.family.attention_path}.{name}"
                yield from self._plain(layer, module, name, shapes[name], "+".join(present))

    def _mlp(self, layer: int, path: str, groups: Groups, width: int, *, shared: bool = False) -> Iterator[Linear]:
        hidden = self.config.hidden_size
        shapes = {"down_proj": (hidden, width), "gate_up_proj": (2 * width, hidden)}
        for names in groups:
            for name in names:
                shape = shapes.get(name, (width, hidden))
                yield from self._plain(layer, f"{path}.{name}", ROLES[name], shape, "+".join(names), shared=shared)

    def _shared_width(self) -> int:
        if self.family.shared_count is None:
            return int(self.config.shared_expert_intermediate_size)
        return int(self.config.moe_intermediate_size * (getattr(self.config, self.family.shared_count) or 0))

    def _plain(
        self, layer: int, module: str, role: str, shape: tuple[int | None, int], together: str, *, shared: bool = False
    ) -> Iterator[Linear]:
        self.total += 1
        runtime = f"model.layers.{layer}.{module}.weight"
        source = disk_name(self.checkpoint, self.family, runtime, prefix=self.prefix)
        if source is None:
            self.missing.append(f"{self.prefix}layers.{layer}.{module}.weight")
            return
        n, k = self._check_shape(source, (shape[0], shape[1]))
        name = source.removesuffix(".weight")
        group = f"{name.rsplit('.', 1)[0]}.{together}"
        yield Linear(name, layer, role, None, shared, n, k, source, (None, 0, n), group, module)

    def experts(self, layer: int) -> Iterator[Linear]:
        """Gate, up and down of each routed expert, from 2-D tensors or from the rows of fused 3-D stacks."""
        family, count = self.family, expert_count(self.config)
        self.expert_total += 3 * count
        self.total += 3 * count
        base = f"{self.prefix}layers.{layer}."
        blocks = dict.fromkeys((family.disk_block, family.block))
        stacks = [(f"{base}{block}.{up}", f"{base}{block}.{down}") for block in blocks for up, down in family.fused]
        for gate_up, down in stacks:
            pair = [
                next((n for n in (name + ".weight", name) if n in self.checkpoint.tensors), None)
                for name in (gate_up, down)
            ]
            if pair[0] is not None and pair[1] is not None:
                yield from self._stacked(layer, base, pair[0], pair[1], count)
                return
        block = next(
            (b for b in blocks if any(n.startswith(f"{base}{b}.experts.") for n in self.checkpoint.tensors)), None
        )
        yield from self._separate(layer, f"{base}{block or family.disk_block}.experts", count)

    def _stacked(self, layer: int, base: str, gate_up: str, down: str, count: int) -> Iterator[Linear]:
        hidden, width = self.config.hidden_size, self._expert_width()
        for name, shape in ((gate_up, (count, 2 * width, hidden)), (down, (count, hidden, width))):
            self._check_shape(name, shape)
        block = gate_up.removeprefix(base).split(".")[0]
        rows = ((gate_up, 0, width, hidden), (gate_up, width, 2 * width, hidden), (down, 0, hidden, width))
        for expert in range(count):
            for part, (source, start, stop, k) in enumerate(rows):
                yield self._expert(layer, f"{base}{block}.experts", expert, part, source, (expert, start, stop), k)

    def _separate(self, layer: int, path: str, count: int) -> Iterator[Linear]:
        hidden, width = self.config.hidden_size, self._expert_width()
        shapes = ((width, hidden), (width, hidden), (hidden, width))
        for expert in range(count):
            for part, (n, k) in enumerate(shapes):
                source = f"{path}.{expert}.{self.family.parts[part]}.weight"
                if source not in self.checkpoint.tensors:
                    self.missing.append(source)
                    continue
                self._check_shape(source, (n, k))
                yield self._expert(layer, path, expert, part, source, (None, 0, n), k)

    def _expert(
        self, layer: int, path: str, expert: int, part: int, source: str, rows: tuple[int | None, int, int], k: int
    ) -> Linear:
        name = f"{path}.{expert}.{self.family.parts[part]}"
        group = f"{path}.{expert}." + ("down" if part == 2 else "gate+up")
        role = ("gate", "up", "down")[part]
        module = f"{self.family.block}.{self.family.experts}"
        return Linear(name, layer, role, expert, False, rows[2] - rows[1], k, source, rows, group, module)

    def _expert_width(self) -> int:
        width = getattr(self.config, "moe_intermediate_size", None)
        return int(self.config.intermediate_size if width is None else width)

    def _check_shape(self, name: str, expected: tuple[int | None, ...]) -> tuple[int, int]:
        info = self.checkpoint.tensors[name]
        fits = len(info.shape) == len(expected) and all(
            want in (None, size) for want, size in zip(expected, info.shape, strict=True)
        )
        if not fits or info.dtype not in WEIGHT_DTYPES | {"BF16", "F16", "F32"}:
            raise UserError(
                "a weight does not fit the config",
                file=info.file,
                item=name,
                found=f"{info.dtype} {list(info.shape)}",
                expected=f"BF16, F16, F32 or FP8 {['any' if size is None else size for size in expected]}",
            )
        return info.shape[-2], info.shape[-1]

    def check_missing(self) -> None:
        if not self.missing:
            return
        lost = sum(".experts." in name for name in self.missing)
        if self.expert_total and lost == self.expert_total:
            problem = f"0 of {self.expert_total} expert weights matched"
        else:
            problem = f"{len(self.missing)} of {self.total} weights to quantize are not in the checkpoint"
        raise UserError(problem, file=self.checkpoint.folder, item=self.missing[0], found="no such tensor")


def _attention_shapes(config: Any, family: Family) -> dict[str, tuple[int | None, int]]:
    """Rows (None: any) and columns of the attention's linears; only those this config has."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    if family.attention is not MLA:
        size = getattr(config, "head_dim", None) or hidden // heads
        kv = None if family.free_heads else config.num_key_value_heads * size
        return {
            "q_proj": (heads * size, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, heads * size),
        }
    query = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    low_rank = config.q_lora_rank
    first = (
        {"q_proj": (query, hidden)}
        if low_rank is None
        else {"q_a_proj": (low_rank, hidden), "q_b_proj": (query, low_rank)}
    )
    return first | {
        "kv_a_proj_with_mqa": (config.kv_lora_rank + config.qk_rope_head_dim, hidden),
        "o_proj": (hidden, heads * config.v_head_dim),
    }
