"""Tiny random models of every family, in a folder as real checkpoints are stored. Each takes well under a second.

tiny(model_type, folder, **config_overrides)  any family, one file, bf16, seed 0
tiny_q3 / tiny_glm / tiny_ds8 / uniform       the named fixtures of the field cases
hollow(folder, shapes, config)                any size, no bytes: glm5_shapes() is GLM-5 itself
byte_tokenizer(folder, bos=, chat_template=)  ids are UTF-8 bytes, specials on bytes it never uses (256 ids)
read_tensors / write_tensors / rewrite / edit_config / stack_experts / split_experts   change a folder afterwards
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"

_BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": 245,
    "eos_token_id": 246,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "head_dim": 16,
}
_GLM: dict[str, Any] = {
    **_MOE,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_TYPES: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse"]}

OVERRIDES: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": {
        **_GLM,
        **_MLA,
        "num_hidden_layers": 4,
        "index_topk": 6,
        "index_head_dim": 32,
        "index_n_heads": 2,
        "indexer_types": ["full", "shared", "full", "shared"],
    },
    "glm4_moe": {**_GLM, "attention_bias": True, "use_qk_norm": True},
    "glm4_moe_lite": {**_GLM, **_MLA, **_TYPES},
    "deepseek_v3": {**_GLM, **_MLA},
    "deepseek_v2": {**_GLM, **_MLA, "topk_method": "greedy"},
    "qwen3_moe": {**_MOE, "num_experts": 4, "norm_topk_prob": True},
    "qwen2_moe": {**_MOE, "num_experts": 4, "shared_expert_intermediate_size": 128},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    "granitemoe": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "embedding_multiplier": 2.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "glm4": {"attention_bias": True},
    "glm5_ref": {
        "vocab_size": 256,
        "num_hidden_layers": 3,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "num_attention_heads": 4,
        "head_dim": 32,
        "gqa_group_size": [4, 2, 1],
        "dsa_min_context": 4,
        "bos_token_id": 245,
        "eos_token_id": 246,
        "pad_token_id": None,
    },
}
MOE_TYPES = tuple(name for name, row in OVERRIDES.items() if "num_experts_per_tok" in row)
ALL_TYPES = tuple(OVERRIDES)


def tiny(
    model_type: str,
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    shards: int = 1,
    scale: float = 0.02,
    **overrides: Any,
) -> Path:
    """A random model in `folder` (made when missing), weights normal(0, scale). One shard has no index."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type == "glm5_ref":
        from glm5_quant.model.glm5 import register

        register()
    base = {} if model_type == "glm5_ref" else _BASE
    values = {**base, **OVERRIDES[model_type], **overrides}
    config = CONFIG_MAPPING[model_type](**values)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomize(model, scale)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tensors = {name: _stored(name, tensor, dtype) for name, tensor in read_tensors(folder).items()}
    write_tensors(folder, tensors, shards=shards)
    edit_config(folder, dtype=str(dtype).removeprefix("torch."))
    return folder


def _randomize(model: torch.nn.Module, scale: float) -> None:
    """normal(0, scale) everywhere; norms near 1; biases and correction biases not 0, so that a lost one shows."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                tensor.copy_(1 + 0.1 * noise)
            elif name.endswith("e_score_correction_bias"):
                tensor.copy_(0.05 * noise)
            else:
                tensor.copy_(scale * noise)


def _stored(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.float() if name.endswith("e_score_correction_bias") else tensor.to(dtype)


def tiny_q3(folder: Path, **overrides: Any) -> Path:
    """TINY-Q3: qwen3_moe, two shards and an index."""
    return tiny("qwen3_moe", folder, shards=2, **overrides)


def tiny_glm(folder: Path, *, shards: int = 1, **overrides: Any) -> Path:
    """TINY-GLM: glm4_moe, layer 0 dense, one shared expert, F32 correction bias, an MTP block as `model.layers.2.*`."""
    tiny("glm4_moe", folder, **overrides)
    tensors = read_tensors(folder)
    last = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    block = {
        n.replace(f"layers.{last - 1}.", f"layers.{last}."): t for n, t in tensors.items() if f"layers.{last - 1}." in n
    }
    hidden = tensors["model.norm.weight"].shape[0]
    generator = torch.Generator().manual_seed(1)
    extra = {
        "eh_proj.weight": torch.randn(hidden, 2 * hidden, generator=generator) * 0.02,
        "enorm.weight": torch.ones(hidden),
        "hnorm.weight": torch.ones(hidden),
        "shared_head.norm.weight": torch.ones(hidden),
        "shared_head.head.weight": torch.randn(tensors["lm_head.weight"].shape, generator=generator) * 0.02,
    }
    block |= {f"model.layers.{last}.{name}": tensor.bfloat16() for name, tensor in extra.items()}
    write_tensors(folder, tensors | {name: tensor.clone() for name, tensor in block.items()}, shards=shards)
    edit_config(folder, num_nextn_predict_layers=1)
    return folder


def tiny_ds8(folder: Path, **overrides: Any) -> Path:
    """TINY-DS8: deepseek_v3, hidden 256, every linear of the decoder layers F8_E4M3 with 128x128 `weight_scale_inv`."""
    tiny("deepseek_v3", folder, **{"hidden_size": 256, "moe_intermediate_size": 192, **overrides})
    tensors = read_tensors(folder)
    for name in [n for n in tensors if re.search(r"layers\.\d+\..*_proj(_with_mqa)?\.weight$", n)]:
        tensors[name], tensors[name + "_scale_inv"] = to_fp8(tensors[name])
    write_tensors(folder, tensors)
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    edit_config(folder, quantization_config=settings)
    return folder


def to_fp8(weight: Tensor, block: int = 128) -> tuple[Tensor, Tensor]:
    """[N, K] -> F8_E4M3 [N, K] and F32 scales [ceil(N/block), ceil(K/block)]."""
    n, k = weight.shape
    scale = torch.empty(-(-n // block), -(-k // block))
    codes = torch.empty(n, k, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            rows, cols = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
            part = weight[rows, cols].float()
            scale[i, j] = part.abs().max().clamp(min=1e-12) / 448
            codes[rows, cols] = (part / scale[i, j]).to(torch.float8_e4m3fn)
    return codes, scale


def uniform(folder: Path, model_type: str = "qwen3_moe", **overrides: Any) -> Path:
    """UNIFORM: the head is all zeros, so every token costs ln(vocabulary)."""
    tiny(model_type, folder, **overrides)
    rewrite(folder, "lm_head.weight", torch.zeros_like)
    return folder


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of all safetensors files of a folder, by name."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], *, shards: int = 1) -> None:
    """Replace the folder's safetensors by these, in name order; an index only when there is more than one shard."""
    for old in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        old.unlink()
    names = sorted(tensors)
    if shards == 1:
        save_file({name: tensors[name].contiguous() for name in names}, folder / "model.safetensors", {"format": "pt"})
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        save_file({name: tensors[name].contiguous() for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))


def rewrite(folder: Path, name: str, change: Callable[[Tensor], Tensor | None]) -> Path:
    """Pass one tensor through `change` and store the result instead (None: delete it). Keeps the number of shards."""
    tensors = read_tensors(folder)
    changed = change(tensors.pop(name).clone())
    if changed is not None:
        tensors[name] = changed
    write_tensors(folder, tensors, shards=len(list(folder.glob("*.safetensors"))))
    return folder


def edit_config(folder: Path, **changes: Any) -> Path:
    """Set keys of config.json; a value of ... (Ellipsis) removes the key."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}, indent=2))
    return folder


EXPERT = re.compile(r"(?P<base>.*)\.experts\.(?P<expert>\d+)\.(?P<part>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_PART = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


def stack_experts(folder: Path) -> Path:
    """Turn per-expert 2-D tensors into stacks `experts.gate_up_proj` [E, 2I, D] and `experts.down_proj` [E, D, I]."""
    plain, blocks = {}, {}
    for name, tensor in read_tensors(folder).items():
        match = EXPERT.fullmatch(name)
        if match is None:
            plain[name] = tensor
        else:
            blocks.setdefault(match["base"], {})[int(match["expert"]), _PART[match["part"]]] = tensor
    for base, parts in blocks.items():
        count = 1 + max(expert for expert, _ in parts)
        gate_up = [torch.cat([parts[e, "gate"], parts[e, "up"]]) for e in range(count)]
        plain[f"{base}.experts.gate_up_proj"] = torch.stack(gate_up)
        plain[f"{base}.experts.down_proj"] = torch.stack([parts[e, "down"] for e in range(count)])
    write_tensors(folder, plain)
    return folder


def split_experts(folder: Path) -> Path:
    """Turn fused stacks (granitemoe, glm5_ref, `stack_experts`) into per-expert 2-D tensors `*_proj.weight`."""
    plain = {}
    for name, tensor in read_tensors(folder).items():
        base = re.sub(
            r"(\.experts)?\.(gate_up_proj|down_proj|input_linear|output_linear)(\.weight)?$", ".experts", name
        )
        if base == name or tensor.dim() != 3:
            plain[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            if "gate_up" in name or "input" in name:
                gate, up = matrix.chunk(2)
                plain |= {f"{base}.{expert}.gate_proj.weight": gate, f"{base}.{expert}.up_proj.weight": up}
            else:
                plain[f"{base}.{expert}.down_proj.weight"] = matrix
    write_tensors(folder, plain)
    return folder


def hollow(folder: Path, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], *, shards: int = 4) -> Path:
    """A BF16 checkpoint of any size that is all headers: the tensors are holes of sparse files and read as zeros."""
    folder.mkdir(parents=True, exist_ok=True)
    names, weight_map = sorted(shapes), {}
    for shard in range(shards):
        header, end = {}, 0
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        for name in part:
            begin, end = end, end + 2 * math.prod(shapes[name])
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [begin, end]}
        raw = json.dumps(header).encode()
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        with (folder / file).open("wb") as stream:
            stream.write(len(raw).to_bytes(8, "little") + raw)
            stream.truncate(8 + len(raw) + end)
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(dict(config)))
    return folder


def glm5_shapes(layers: int = 78, experts: int = 256) -> dict[str, tuple[int, ...]]:
    """Every tensor of GLM-5 as it is stored, without the MTP layer: 59,079 of them."""
    d, shapes = 6144, {"model.embed_tokens.weight": (154_880, 6144), "lm_head.weight": (154_880, 6144)}
    shapes["model.norm.weight"] = (d,)
    attention = {
        "q_a_proj": (2048, d),
        "q_a_layernorm": (2048,),
        "q_b_proj": (64 * 256, 2048),
        "kv_a_proj_with_mqa": (512 + 64, d),
        "kv_a_layernorm": (512,),
        "kv_b_proj": (64 * (192 + 256), 512),
        "o_proj": (d, 64 * 256),
        "indexer.wq_b": (32 * 128, 2048),
        "indexer.wk": (128, d),
        "indexer.k_norm": (128,),
        "indexer.weights_proj": (32, d),
    }
    for layer in range(layers):
        base = f"model.layers.{layer}"
        shapes |= {f"{base}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes[f"{base}.self_attn.indexer.k_norm.bias"] = (128,)
        shapes |= {f"{base}.{name}_layernorm.weight": (d,) for name in ("input", "post_attention")}
        if layer >= 3:
            shapes |= {f"{base}.mlp.gate.weight": (experts, d), f"{base}.mlp.gate.e_score_correction_bias": (experts,)}
        width = 2048 if layer >= 3 else 12_288
        blocks = [f"experts.{e}." for e in range(experts)] + ["shared_experts."] if layer >= 3 else [""]
        for block in blocks:
            shapes |= {f"{base}.mlp.{block}{name}_proj.weight": (width, d) for name in ("gate", "up")}
            shapes[f"{base}.mlp.{block}down_proj.weight"] = (d, width)
    return shapes


SPECIALS = {"<s>": 245, "</s>": 246, "<pad>": 247, "<|user|>": 248, "<|assistant|>": 249, "<|system|>": 250}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer(folder: Path, bos: bool = True, chat_template: str | None = None) -> Path:
    """A tokenizer whose ids are UTF-8 bytes (0..255) with specials on bytes 245.. that UTF-8 never uses.

    `bos`: plain text starts with <s>. `chat_template`: Jinja text (CHAT_TEMPLATE is a plain one), or none.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    special = {value: name for name, value in SPECIALS.items()}
    vocabulary = {special.get(byte, letter): byte for byte, letter in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", SPECIALS["<s>"])]
        )
    names = {"eos_token": "</s>", "pad_token": "<pad>"} | ({"bos_token": "<s>"} if bos else {})
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template, **names)
    folder.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(folder)
    return folder
