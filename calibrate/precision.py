"""Which parts of a model are not INT4: kept in source precision, or stored in 8 bits (EAMPQ step 10).

Dimensions: V vocabulary, D hidden, R numeric rows.
The head has no place in the loop over layers: it is written after the last one, in 8 bits, with the rows of numeric
tokens beside it in source precision, which only our own runtime reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glm5_quant.model.checkpoint import Checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.export_plan import PACKED, SCALE, SHAPE
from glm5_quant.model.families import Family, Linear, disk_name
from glm5_quant.model.journal import SIDECAR_PREFIX, Journal
from glm5_quant.model.shards import DTYPE_NAMES, Spec, write_shard
from glm5_quant.model.tokenizing import decoded_vocabulary, load_tokenizer
from glm5_quant.quant.eight import round_eight
from glm5_quant.quant.numeric import numeric_token_ids
from glm5_quant.quant.packing import pack_bytes

HEAD, EMBEDDING = "lm_head", "model.embed_tokens"
ROWS = 8192


def part_of(item: Linear, family: Family) -> str:
    """The name that settings have for the part a linear belongs to."""
    if item.module.startswith(family.attention_path + "."):
        return "attention"
    if item.expert is not None:
        return "experts"
    return "shared_experts" if item.shared else "dense_mlp"


def write_head(journal: Journal, checkpoint: Checkpoint, family: Family, group_size: int) -> None:
    """Write the head in 8 bits to `layers/model.safetensors`. A head that is tied to the embedding is its copy."""
    name = disk_name(checkpoint, family, f"{HEAD}.weight")
    source = name or disk_name(checkpoint, family, f"{EMBEDDING}.weight")
    if source is None:
        raise UserError("no head in this checkpoint", file=checkpoint.folder, item=f"{HEAD}.weight")
    module, (rows, k) = (name or f"{HEAD}.weight").removesuffix(".weight"), checkpoint.info(source).shape
    packed, scales = [], []
    for start in range(0, rows, ROWS):
        part_VD = checkpoint.read_rows(source, range(start, min(start + ROWS, rows)), torch.float32)
        codes_VD, grid = round_eight(part_VD, group_size=group_size, scale_dtype=checkpoint.dtype)
        packed.append(pack_bytes(codes_VD))
        scales.append(grid.scale.to(checkpoint.dtype))
    tensors = {module + PACKED: torch.cat(packed), module + SCALE: torch.cat(scales)}
    tensors |= {module + SHAPE: torch.tensor([rows, k])} | _numeric_rows(checkpoint, source, module, rows)
    specs = [Spec(name, DTYPE_NAMES[one.dtype], tuple(one.shape)) for name, one in tensors.items()]
    write_shard(journal.folder / "layers" / "model.safetensors", specs, tensors.__getitem__)


def _numeric_rows(checkpoint: Checkpoint, source: str, module: str, rows: int) -> dict[str, Tensor]:
    ids = numeric_token_ids(decoded_vocabulary(load_tokenizer(checkpoint.folder)))
    kept = [i for i in ids if i < rows]
    if not kept:
        return {}
    base = f"{SIDECAR_PREFIX}{module}.row"
    weight_RD = checkpoint.read_rows(source, kept).to(checkpoint.dtype)
    return {f"{base}_index": torch.tensor(kept, dtype=torch.int32), f"{base}_weight": weight_RD}
