"""Any peer's INT4 folder as plain float32 tensors, by the rules of its own format; no runtime of theirs takes part.

Formats: compressed-tensors `pack-quantized` (llm-compressor, AutoRound, glm5-quant's base), GPTQ (`qweight`/`qzeros`:
GPTQModel, AutoRound) and AWQ (AutoRound). Legend: N rows out, K columns in, B groups.

- pack-quantized: weight_packed int32 [N, K/8] and weight_zero_point int32 [N/8, B], eight fields of 4 bits a word,
  lowest first; a stored field is the signed value plus 8, for weights and zero-points alike, so
  weight = (field - zero field) * scale; symmetric means a zero field of 8.
- GPTQ: qweight int32 [K/8, N] packed along K, qzeros int32 [B, N/8] packed along N, scales [B, N], g_idx [K]. The first
  version of the format stores the zero-point minus one; `gptq_v2` and AutoRound's own packing store it as it is.
- AWQ: qweight int32 [K, N/8], qzeros [B, N/8], field order 0 2 4 6 1 3 5 7 within a word.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where column j of a word of eight lies


def unpack(words: torch.Tensor, dim: int) -> torch.Tensor:
    """Fields of 4 bits, lowest first, along `dim`: int32 [R, C] -> int32 [R, 8C] (dim 1) or [8R, C] (dim 0)."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    if dim == 1:
        return ((words[:, :, None] >> shifts) & 15).reshape(words.shape[0], -1)
    return ((words[:, None, :] >> shifts[:, None]) & 15).reshape(-1, words.shape[1])


def group_index(columns: int, groups: int, group_size: int) -> torch.Tensor:
    """Group of each input column [K]. Where `group_size` does not divide K a peer's is smaller: seen from B."""
    size = group_size if groups == -(-columns // group_size) else columns // groups
    return torch.arange(columns) // size


def from_pack_quantized(parts: dict[str, torch.Tensor], group_size: int) -> torch.Tensor:
    """float32 [N, K] from weight_packed, weight_scale, weight_shape and, asymmetric only, weight_zero_point."""
    rows, columns = parts["weight_shape"].tolist()
    scale = parts["weight_scale"].float()
    index = group_index(columns, scale.shape[1], group_size)
    codes = unpack(parts["weight_packed"], 1)[:, :columns].float()
    zero = torch.full_like(scale, 8.0)
    if "weight_zero_point" in parts:
        zero = unpack(parts["weight_zero_point"], 0)[:rows].float()
    return (codes - zero[:, index]) * scale[:, index]


def from_gptq(parts: dict[str, torch.Tensor], group_size: int, zero_offset: int) -> torch.Tensor:
    """float32 [N, K] from qweight, qzeros, scales and, where stored, g_idx; `zero_offset` is 1 for version 1."""
    scale = parts["scales"].float()
    codes = unpack(parts["qweight"], 0).float()
    zero = unpack(parts["qzeros"], 1)[:, : scale.shape[1]].float() + zero_offset
    index = parts["g_idx"].long() if "g_idx" in parts else group_index(len(codes), len(scale), group_size)
    return ((codes - zero[index]) * scale[index]).T.contiguous()


def from_awq(parts: dict[str, torch.Tensor], group_size: int) -> torch.Tensor:
    """float32 [N, K] from AWQ's qweight [K, N/8], qzeros and scales."""
    scale = parts["scales"].float()

    def ordered(words: torch.Tensor) -> torch.Tensor:
        return unpack(words, 1).view(len(words), -1, 8)[:, :, list(AWQ_ORDER)].reshape(len(words), -1).float()

    codes, zero = ordered(parts["qweight"]), ordered(parts["qzeros"])
    index = group_index(len(codes), len(scale), group_size)
    return ((codes - zero[index]) * scale[index]).T.contiguous()


def group_size_of(quantization: dict) -> int:
    """The group size that a quantization config names, 64 where it names several or none."""
    groups = quantization.get("config_groups", {})
    sizes = {group["weights"]["group_size"] for group in groups.values() if group.get("weights")}
    if not sizes and quantization.get("group_size"):
        sizes = {quantization["group_size"]}
    return max(sizes, default=64)


def weight_of(parts: dict[str, torch.Tensor], quantization: dict) -> torch.Tensor:
    """One module's weight from whatever packed parts it has."""
    group_size = group_size_of(quantization)
    if "weight_packed" in parts:
        return from_pack_quantized(parts, group_size)
    packing = quantization.get("packing_format", "")
    if "awq" in packing or quantization.get("quant_method") == "awq":
        return from_awq(parts, group_size)
    plain_zero = quantization.get("checkpoint_format") == "gptq_v2" or packing in {"auto_round", "auto_round:exllamav2"}
    return from_gptq(parts, group_size, 0 if plain_zero else 1)


PACKED = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
PACKED += ("qweight", "qzeros", "scales", "g_idx")


def read_folder(folder: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """(config without its quantization entry, every tensor by plain name in float32; integer tensors as they are)."""
    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config", None) or {}
    if quantization.get("format") == "eampq-pack-quantized":
        inputs = quantization.get("eampq_inputs")
        raise ValueError(f"{folder.name}: its codes expect inputs that are changed first ({inputs}); use --runtime")
    tensors: dict[str, torch.Tensor] = {}
    packed: dict[str, dict[str, torch.Tensor]] = {}
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    for path in files:
        with safe_open(path, "pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - a handle is not a dict
                module, _, part = name.rpartition(".")
                tensor = handle.get_tensor(name)
                if part in PACKED:
                    packed.setdefault(module, {})[part] = tensor
                else:
                    tensors[name] = tensor.float() if tensor.is_floating_point() else tensor
    for module, parts in packed.items():
        tensors[f"{module}.weight"] = weight_of(parts, quantization)
    return config, tensors
