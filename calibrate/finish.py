"""After the last layer: spend the model's one byte budget for shadows on what every layer offered (EAMPQ step 7).

Dimensions: N out, K in, S shadow columns, L layers, E experts.
Super experts come first, each as a whole copy (its residual on all K inputs); the rest goes to single columns by error
removed per byte. A layer whose purchases do not lower the error of tokens kept out of the fit is refused, and the
money is spent again without it. The result is `shadows.safetensors`, in the sidecar's names, and `finish.json`, which
is the commit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from glm5_quant.calibrate.shadows import Facts, fp16_bytes, network_of
from glm5_quant.model.checkpoint import Checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.export_plan import PACKED, PART_ENDINGS, SCALE, SHAPE, ZERO
from glm5_quant.model.families import Linear, read_linear
from glm5_quant.model.journal import SIDECAR_PREFIX, FinishRecord, Journal, write_record
from glm5_quant.model.safetensors_header import read_header
from glm5_quant.model.shards import Spec, write_shard
from glm5_quant.quant.budget import Offer, Purchase, spend
from glm5_quant.quant.config import QuantConfig
from glm5_quant.quant.grid import Grid, dequantize
from glm5_quant.quant.packing import unpack_codes, unpack_zeros
from glm5_quant.quant.profile import super_experts
from glm5_quant.quant.rotation import rotate
from glm5_quant.quant.shadow import column_bytes, prefix_residual, store_int8


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one matrix offers, or one part of its inputs."""

    name: str
    drops: list[float]
    unseen: list[float]
    facts: Facts


@dataclass(kw_only=True)
class Matrix:
    """A matrix with all its parts; sizes are summed over them."""

    linear: Linear
    parts: list[Part] = field(default_factory=list)

    def total(self, name: str) -> float:
        return sum(float(getattr(part.facts, name)) for part in self.parts)

    @property
    def share(self) -> float:
        return max((part.facts.share for part in self.parts), default=0.0)

    @property
    def weight(self) -> float:
        """What one unit of this matrix's squared error is worth: see calibrate/shadows.py."""
        size = self.total("size")
        return self.share / size if size > 0 else 0.0

    def unseen_change(self, counts: dict[str, int]) -> float:
        """Change of the held-out error when so many columns of each part are bought, in the same unit."""
        size = self.total("held_size")
        bought = [(part.unseen, counts.get(part.name, 0)) for part in self.parts]
        changes = [unseen[count - 1] for unseen, count in bought if count and unseen]
        return self.share * sum(changes) / size if size > 0 else 0.0


def finish(
    journal: Journal,
    checkpoint: Checkpoint,
    items: Sequence[Linear],
    config: QuantConfig,
    tables_sha256: str | None = None,
) -> FinishRecord:
    """Buy shadows for the matrices `items`, write them and the record that completes the journal. `tables_sha256`: the
    digest of head and embedding in 8 bits, which are written."""
    journal.finish_file.unlink(missing_ok=True)
    journal.shadow_file.unlink(missing_ok=True)
    budget = int(config.shadow_budget * fp16_bytes(items))
    market = _Market(journal, checkpoint, items, config) if budget else None
    record = market.buy(budget) if market else FinishRecord(expert_fp16_bytes=fp16_bytes(items))
    record = record.model_copy(update={"tables_sha256": tables_sha256})
    write_record(journal.finish_file, record)
    return record


class _Market:
    """Everything that is for sale, and what becomes of it."""

    def __init__(self, journal: Journal, checkpoint: Checkpoint, items: Sequence[Linear], config: QuantConfig) -> None:
        self.journal, self.checkpoint, self.items, self.config = journal, checkpoint, items, config
        self.int8 = config.shadow_dtype == "int8"
        self.matrices = self._read()

    def buy(self, budget_bytes: int) -> FinishRecord:
        whole, refused = self._whole_experts(), set[int]()
        while True:
            offers = [
                offer for m in self.matrices.values() if m.linear.layer not in refused for offer in self._offers(m)
            ]
            experts = {name: size for name, (layer, size) in whole.items() if layer not in refused}
            bought = spend(offers, budget_bytes, experts)
            worse = {layer for layer, change in self._unseen_changes(bought).items() if change >= 0}
            if not worse:
                break
            refused |= worse
        digest = self._write(bought) if bought.spent_bytes else None
        before = sum(m.weight * m.total("wrong") for m in self.matrices.values()) or 1.0
        drops = (
            m.weight * sum(part.drops[: bought.columns.get(part.name, 0)])
            for m in self.matrices.values()
            for part in m.parts
        )
        copied = [m for m in self.matrices.values() if network_of(m.linear.name) in bought.experts]
        return FinishRecord(
            shadows_sha256=digest,
            budget_bytes=budget_bytes,
            spent_bytes=bought.spent_bytes,
            expert_fp16_bytes=fp16_bytes(self.items),
            expert_int4_bytes=self._int4_bytes(),
            columns=sum(bought.columns.values()),
            experts=list(bought.experts),
            gain=(sum(drops) + sum(m.weight * m.total("wrong") for m in copied)) / before,
            held_out_gain=-sum(self._unseen_changes(bought).values()) / before,
            refused_layers=sorted(refused),
        )

    # -- what is for sale --------------------------------------------------------------------------------------------

    def _read(self) -> dict[str, Matrix]:
        by_layer: dict[int, list[Linear]] = defaultdict(list)
        for item in self.items:
            by_layer[item.layer].append(item)
        found = {}
        for layer, items in sorted(by_layer.items()):
            path = self.journal.candidates_file(layer)
            if not path.exists():
                raise UserError(
                    "shadow candidates of a finished layer are missing",
                    file=path,
                    hint="Start again with `--resume never`",
                )
            try:
                with safe_open(path, "pt") as file:
                    parts = _parts(file)
            except SafetensorError as error:
                problem, hint = f"cannot be read: {error}", "Start again with `--resume never`"
                raise UserError(problem, file=path, hint=hint) from None
            for item in items:
                found[item.name] = Matrix(linear=item, parts=parts.get(item.name, []))
        return found

    def _offers(self, matrix: Matrix) -> list[Offer]:
        return [
            Offer(
                matrix=part.name,
                drops=part.drops,
                column_bytes=column_bytes(matrix.linear.n, int8=self.int8),
                weight=matrix.weight,
                expert=network_of(matrix.linear.name),
            )
            for part in matrix.parts
        ]

    def _whole_experts(self) -> dict[str, tuple[int, int]]:
        """Layer and bytes of a whole copy of each super expert, strongest first; none where it would not help."""
        networks: dict[tuple[int, int], list[Matrix]] = defaultdict(list)
        for matrix in self.matrices.values():
            if matrix.linear.expert is not None:
                networks[matrix.linear.layer, matrix.linear.expert].append(matrix)
        if not networks:
            return {}
        layers = sorted({layer for layer, _ in networks})
        peak_LE = torch.zeros(len(layers), 1 + max(expert for _, expert in networks))
        for (layer, expert), members in networks.items():
            peaks = [part.facts.peak for matrix in members for part in matrix.parts]
            peak_LE[layers.index(layer), expert] = max(peaks, default=0.0)
        found = {}
        for row, expert in super_experts(peak_LE):
            members = networks[layers[row], expert]
            size = sum(m.linear.k * column_bytes(m.linear.n, int8=self.int8) for m in members)
            if sum(self._copy_change(matrix) for matrix in members) <= 0:
                found[network_of(members[0].linear.name)] = layers[row], size
        return found

    def _copy_change(self, matrix: Matrix) -> float:
        """Change of the held-out error when a matrix is kept whole: what the record says quantization costs there."""
        return -matrix.share * self._costs(matrix.linear.layer).get(matrix.linear.name, 0.0)

    def _costs(self, layer: int) -> dict[str, float]:
        modules = self.journal.record(layer).modules
        judged = {name: module for name, module in modules.items() if module.held_out_error is not None}
        return {name: (module.held_out_error or 0.0) - module.held_out_floor for name, module in judged.items()}

    def _unseen_changes(self, bought: Purchase) -> dict[int, float]:
        """By layer, the change of its networks' held-out error; layers about which held-out tokens say nothing are
        left out."""
        changes: dict[int, float] = defaultdict(float)
        for matrix in self.matrices.values():
            if network_of(matrix.linear.name) in bought.experts:
                changes[matrix.linear.layer] += self._copy_change(matrix)
            elif any(bought.columns.get(part.name) and part.unseen for part in matrix.parts):
                changes[matrix.linear.layer] += matrix.unseen_change(bought.columns)
        return changes

    # -- what is written ---------------------------------------------------------------------------------------------

    def _write(self, bought: Purchase) -> str:
        specs = [spec for matrix in self.matrices.values() for spec in self._specs(matrix, bought)]

        def read(name: str) -> Tensor:
            module, _, kind = name.removeprefix(SIDECAR_PREFIX).rpartition(".")
            matrix = self.matrices[module]
            # Indices are written before all residuals, so making these for them would be for nothing.
            return self._index(matrix, bought) if kind == "shadow_index" else self._residuals(matrix, bought)[kind]

        return write_shard(self.journal.shadow_file, specs, read).sha256

    def _count(self, matrix: Matrix, bought: Purchase) -> int:
        if network_of(matrix.linear.name) in bought.experts:
            return matrix.linear.k
        return sum(bought.columns.get(part.name, 0) for part in matrix.parts)

    def _specs(self, matrix: Matrix, bought: Purchase) -> list[Spec]:
        count, base = self._count(matrix, bought), f"{SIDECAR_PREFIX}{matrix.linear.name}.shadow"
        if not count:
            return []
        weight = Spec(f"{base}_weight", "I8" if self.int8 else "F16", (matrix.linear.n, count))
        scale = [Spec(f"{base}_scale", "F16", (count,))] if self.int8 else []
        return [Spec(f"{base}_index", "I32", (count,)), weight, *scale]

    def _index(self, matrix: Matrix, bought: Purchase) -> Tensor:
        """The input channels of a matrix's shadow columns, int32 [S]."""
        if network_of(matrix.linear.name) in bought.experts:
            return torch.arange(matrix.linear.k, dtype=torch.int32)
        with safe_open(self.journal.candidates_file(matrix.linear.layer), "pt") as file:
            return torch.cat(
                [file.get_tensor(f"{p.name}.channels")[: bought.columns.get(p.name, 0)] for p in matrix.parts]
            )

    def _residuals(self, matrix: Matrix, bought: Purchase) -> dict[str, Tensor]:
        """One matrix's residual columns as stored. They are made here, since they depend on how many were bought."""
        if network_of(matrix.linear.name) in bought.experts:
            residual_NS = self._whole_residual(matrix.linear)
        else:
            residual_NS = self._column_residual(matrix, bought)
        if self.int8:
            steps_NS, scale_S = store_int8(residual_NS)
            return {"shadow_weight": steps_NS, "shadow_scale": scale_S}
        largest = torch.finfo(torch.float16).max
        return {"shadow_weight": residual_NS.clamp(-largest, largest).half()}

    def _column_residual(self, matrix: Matrix, bought: Purchase) -> Tensor:
        with safe_open(self.journal.candidates_file(matrix.linear.layer), "pt") as file:
            parts = []
            for part in matrix.parts:
                count = bought.columns.get(part.name, 0)
                reach, within = (file.get_tensor(f"{part.name}.{key}") for key in ("reach", "within"))
                parts.append(prefix_residual(reach, within, count) if count else reach[:, :0])
            return torch.cat(parts, dim=1)

    def _whole_residual(self, linear: Linear) -> Tensor:
        """W - W^ in the inputs that codes see, float32 [N, K]."""
        weight_NK = read_linear(self.checkpoint, linear, torch.float32)
        if self.config.rotation == "full":
            weight_NK = rotate(weight_NK)
        with safe_open(self.journal.layer_file(linear.layer), "pt") as file:
            scaled = f"{SIDECAR_PREFIX}{linear.name}.activation_scale"
            if scaled in file.keys():  # noqa: SIM118
                weight_NK = weight_NK * file.get_tensor(scaled)
            return weight_NK - restored(file, linear.name, self.config.group_size)

    def _int4_bytes(self) -> int:
        """What the same matrices take in INT4: codes, scales, zero-points and shapes."""
        names = {item.name + ending for item in self.items for ending in PART_ENDINGS}
        layers = sorted({item.layer for item in self.items})
        headers = (read_header(self.journal.layer_file(layer)) for layer in layers)
        return sum(info.nbytes for header in headers for name, info in header.items() if name in names)


def _parts(file: Any) -> dict[str, list[Part]]:
    """What a layer offers, by matrix."""
    parts = defaultdict(list)
    for name in sorted(key.removesuffix(".facts") for key in file.keys() if key.endswith(".facts")):  # noqa: SIM118
        drops, unseen, facts = (file.get_tensor(f"{name}.{key}").tolist() for key in ("drops", "unseen", "facts"))
        parts[name.partition("#")[0]].append(Part(name=name, drops=drops, unseen=unseen, facts=Facts.of(facts)))
    return parts


def restored(file: Any, module: str, group_size: int) -> Tensor:
    """A matrix as its codes and grid in a layer file stand for it, float32 [N, K]."""
    n, k = file.get_tensor(module + SHAPE).tolist()
    scale_NB = file.get_tensor(module + SCALE).float()
    stored = module + ZERO in file.keys()  # noqa: SIM118
    zero_NB = unpack_zeros(file.get_tensor(module + ZERO), n) if stored else torch.full_like(scale_NB, 8).byte()
    codes_NK = unpack_codes(file.get_tensor(module + PACKED), k)
    return dequantize(codes_NK, Grid(scale=scale_NB, zero=zero_NB, group_size=group_size))
