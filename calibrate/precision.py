"""Which parts of a model are not INT4: kept in source precision, or stored in 8 bits (EAMPQ step 10).

Dimensions: V vocabulary, D hidden, R numeric rows.
Head and embedding have no place in the loop over layers: they are written after the last one, with the rows of
numeric tokens beside them in source precision, which only our own runtime reads. Both streams start from the source's
embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glm5_quant.calibrate.settings import Settings
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

HEAD, EMBEDDING = "lm_head", "embed_tokens"
_PATH = {HEAD: HEAD, EMBEDDING: f"model.{EMBEDDING}"}
ROWS = 8192


def part_of(item: Linear, family: Family) -> str:
    """The name that settings have for the part a linear belongs to."""
    if item.module.startswith(family.attention_path + "."):
        return "attention"
    if item.expert is not None:
        return "experts"
    return "shared_experts" if item.shared else "dense_mlp"


def _stored(checkpoint: Checkpoint, family: Family) -> tuple[str | None, str]:
    """Names on disk of the head, None where it is tied to the embedding, and of the embedding."""
    head, table = (disk_name(checkpoint, family, f"{path}.weight") for path in _PATH.values())
    if table is None:
        raise UserError("no embedding in this checkpoint", file=checkpoint.folder, item=f"{_PATH[EMBEDDING]}.weight")
    return head, table


def table_bytes(checkpoint: Checkpoint, family: Family, settings: Settings) -> tuple[int, int]:
    """Bytes that `write_tables` writes, but for numeric rows, and those of the source that they replace."""
    if not {HEAD, EMBEDDING} & set(settings.int8):
        return 0, 0
    head, table = _stored(checkpoint, family)
    written = replaced = 0
    for name, source in ((HEAD, head), (EMBEDDING, table)):
        info = checkpoint.info(source or table)
        if name in settings.int8:
            rows, k = info.shape
            written += rows * (k + -(-k // settings.quant.group_size) * checkpoint.dtype.itemsize)
            replaced += info.nbytes if source else 0
        elif source is None:
            written += info.nbytes
    return written, replaced


def write_tables(journal: Journal, checkpoint: Checkpoint, family: Family, settings: Settings) -> str | None:
    """Write head and embedding to `layers/model.safetensors` in 8 bits, those of them that `settings` names.

    Returns the digest of that file, None where there is none.

    A head that is tied to the embedding becomes a matrix of its own as soon as one of the two is stored so.
    """
    wanted = [name for name in (HEAD, EMBEDDING) if name in settings.int8]
    if not wanted:
        return None
    head, table = _stored(checkpoint, family)
    tied = head is None
    tensors: dict[str, Tensor] = {}
    for name in wanted:
        source = head or table if name == HEAD else table
        module = HEAD if name == HEAD and tied else source.removesuffix(".weight")
        tensors |= _eight(checkpoint, source, module, settings.quant.group_size)
    if tied and HEAD not in wanted:
        tensors[f"{HEAD}.weight"] = checkpoint.read(table)
    specs = [Spec(name, DTYPE_NAMES[one.dtype], tuple(one.shape)) for name, one in tensors.items()]
    return write_shard(journal.tables_file, specs, tensors.__getitem__).sha256


def _eight(checkpoint: Checkpoint, source: str, module: str, group_size: int) -> dict[str, Tensor]:
    rows, k = checkpoint.info(source).shape
    packed, scales = [], []
    for start in range(0, rows, ROWS):
        part_VD = checkpoint.read_rows(source, range(start, min(start + ROWS, rows)), torch.float32)
        codes_VD, grid = round_eight(part_VD, group_size=group_size, scale_dtype=checkpoint.dtype)
        packed.append(pack_bytes(codes_VD))
        scales.append(grid.scale.to(checkpoint.dtype))
    tensors = {module + PACKED: torch.cat(packed), module + SCALE: torch.cat(scales)}
    return tensors | {module + SHAPE: torch.tensor([rows, k])} | _numeric_rows(checkpoint, source, module, rows)


def _numeric_rows(checkpoint: Checkpoint, source: str, module: str, rows: int) -> dict[str, Tensor]:
    ids = numeric_token_ids(decoded_vocabulary(load_tokenizer(checkpoint.folder)))
    kept = [i for i in ids if i < rows]
    if not kept:
        return {}
    base = f"{SIDECAR_PREFIX}{module}.row"
    weight_RD = checkpoint.read_rows(source, kept).to(checkpoint.dtype)
    return {f"{base}_index": torch.tensor(kept, dtype=torch.int32), f"{base}_weight": weight_RD}
