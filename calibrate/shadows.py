"""Shadow candidates of one layer, gathered while it is solved (EAMPQ step 7); `finish` decides which are bought.

Dimensions: N out, K in, S candidate columns, T tokens, D hidden.
`layers/00012.shadows.safetensors` holds, for a matrix M (and `M#4096` for its inputs from 4096 on, where H is cut):

    M.channels int32 [S]      input channels as M's codes see them (rotated where they are), in the order of the choice
    M.drops float64 [S]       error drop of each, given those before it
    M.unseen float64 [S]      change of the held-out error with the first 1..S of them; empty without held-out tokens
    M.reach float32 [N, S], M.within float32 [S, S]     what their residual is made of (quant/shadow.py)
    M.facts float64 [5]       `Facts`, in the order of its fields

What an error is worth. EAMPQ asks for rho, the KL that one unit of relative error costs at a layer and projection. Its
stand-in here costs no pass of its own: the share of the residual stream that the expert writes, mean over all tokens
of |c y_t|^2 / |h_t|^2 with h the layer's output, 0 for tokens that the expert does not see. A relative error of gate,
up or down becomes a relative error of y, and that share of it an error of the stream relative to the stream, which is
what the next norm sees. It is assumed that such an error costs the same KL at every depth. Routing frequency is in
that mean.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import astuple, dataclass, field, fields, replace

import torch
from torch import Tensor

from glm5_quant.calibrate.seen import Seen
from glm5_quant.calibrate.spill import Spill
from glm5_quant.calibrate.stream import relative_weights, windows
from glm5_quant.model.families import Family, Linear
from glm5_quant.quant.config import QuantConfig
from glm5_quant.quant.shadow import Candidates, find_columns, unseen_changes
from glm5_quant.quant.shrinkage import Noise, shrinkage, trusted
from glm5_quant.quant.statistics import Moments

# Candidates a matrix may offer, as a multiple of its even share of the budget.
MULTIPLE = 4
DAMP = 0.01


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Of one matrix (or part): tr(W H W^T), tr(E H E^T) under the H that drops are measured by, tr(W H W^T) on
    held-out tokens; of its network: its share of the stream and the largest output of its down-projection."""

    size: float
    wrong: float
    held_size: float
    share: float = 0.0
    peak: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Facts:
        """From the values as stored, in the order of the fields."""
        return cls(**dict(zip((f.name for f in fields(cls)), values, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Solution:
    """One group of matrices over one part of its inputs, just solved. Rows are stacked; `target`, `restored` and
    `hessian` are in the inputs that codes see, `weights` and the moments in the plain ones. `noise` is what
    H was shrunk by beside the config's trust."""

    weights_NK: Sequence[Tensor]
    target_NK: Tensor
    restored_NK: Tensor
    hessian_KK: Tensor
    total: Moments
    held: Moments
    held_lack_NK: Tensor | None = None
    noise: Noise | None = None
    seen: Seen = field(default_factory=Seen)


def shadowed(items: Iterable[Linear], family: Family, without: Collection[str] = ()) -> list[Linear]:
    """The matrices that may have shadows: those of routed experts; in a model without any, those of every MLP; but not
    those `without`, which are stored in 8 bits."""
    items = [item for item in items if item.name not in without]
    experts = [item for item in items if item.expert is not None]
    return experts or [item for item in items if not item.module.startswith(family.attention_path + ".")]


def candidate_count(k: int, budget: float) -> int:
    """How many columns a matrix of k inputs offers under a budget that is this share of the FP16 bytes."""
    return min(k, math.ceil(MULTIPLE * budget * k))


def candidate_bytes(items: Iterable[Linear], budget: float) -> int:
    """Bytes of all candidates in the journal."""
    counts = ((item.n, candidate_count(item.k, budget)) for item in items)
    return sum(count * (4 * item_n + 4 * count + 20) + 40 for item_n, count in counts if count)


def fp16_bytes(items: Iterable[Linear]) -> int:
    return sum(2 * item.n * item.k for item in items)


@dataclass(kw_only=True)
class ShadowFinder:
    """Gathers one layer's candidates. `names` are the matrices that may have shadows; `offers` what they offer."""

    config: QuantConfig
    names: frozenset[str]
    offers: Spill = field(default_factory=Spill)
    facts: dict[str, Facts] = field(default_factory=dict)
    energy: dict[str, list[tuple[Tensor | int, Tensor]]] = field(default_factory=dict)
    peak: dict[str, float] = field(default_factory=dict)

    def add(self, linears: Sequence[Linear], first: int, solution: Solution, sizes: Sequence[Facts]) -> None:
        """Choose candidates for each matrix of a group solved on some tokens, for its inputs from `first` on."""
        if linears[0].name not in self.names or not solution.total.tokens:
            return
        trusted_KK = solution.hessian_KK
        if self.config.shrink:
            trusted_KK = trusted(trusted_KK, solution.total.n_eff, self.config.shrink_trust, solution.noise)
        row = 0
        for linear, weight_NK, facts in zip(linears, solution.weights_NK, sizes, strict=True):
            rows = slice(row, row + weight_NK.shape[0])
            row = rows.stop
            error_NK = solution.target_NK[rows] - solution.restored_NK[rows]
            count = candidate_count(weight_NK.shape[1], self.config.shadow_budget)
            found = find_columns(error_NK, trusted_KK, count, DAMP)
            if len(found.channels):
                name = f"{linear.name}#{first}" if first else linear.name
                self.facts[name] = replace(facts, wrong=found.whole)
                self.offers.tensors |= {
                    f"{name}.channels": (found.channels + first).int(),
                    f"{name}.drops": found.drops,
                    f"{name}.unseen": self._unseen(found, error_NK, solution.restored_NK[rows], weight_NK, solution),
                    f"{name}.reach": found.reach,
                    f"{name}.within": found.within,
                }

    def _unseen(
        self, found: Candidates, error_NK: Tensor, restored_NK: Tensor, weight_NK: Tensor, solution: Solution
    ) -> Tensor:
        """Held-out change with a residual fitted on the other tokens only; empty where there are none of either."""
        total, held = solution.total, solution.held
        fit_weight = total.weight_sum - held.weight_sum
        if not held.tokens or total.tokens == held.tokens or fit_weight <= 0:
            return torch.empty(0, dtype=torch.float64)
        chosen_SK = weight_NK.new_zeros(len(found.channels), weight_NK.shape[1])
        basis_KS = solution.seen.plain(chosen_SK.scatter_(1, found.channels[:, None], 1.0)).T
        held_KS = held.hessian_KK @ basis_KS
        fit_KS = (total.weight_sum * (total.hessian_KK @ basis_KS) - held.weight_sum * held_KS) / fit_weight
        within_SS, near_NS = basis_KS.T @ fit_KS, error_NK[:, found.channels]
        squares = total.weight_square_sum - held.weight_square_sum
        r = 0.0
        if self.config.shrink and squares > 0:
            r = shrinkage(weight_NK.shape[1], fit_weight**2 / squares, self.config.shrink_trust)
        extra = DAMP * float(solution.hessian_KK.diagonal().mean())
        diagonal_S = within_SS.diagonal().clone()
        reach_NS = (1 - r) * (solution.seen.plain(error_NK) @ fit_KS) + near_NS * (r * diagonal_S + extra)
        within_SS = (1 - r) * within_SS
        within_SS.diagonal().copy_(diagonal_S + extra)
        unseen_NS = (weight_NK - solution.seen.plain(restored_NK)) @ held_KS
        if held.gap_KK is not None:
            unseen_NS += weight_NK @ (held.gap_KK @ basis_KS)
        if solution.held_lack_NK is not None:
            unseen_NS += solution.held_lack_NK @ basis_KS
        return unseen_changes(reach_NS, within_SS, unseen_NS, basis_KS.T @ held_KS)

    def watch(self, down: Linear, index: Tensor | int, y_TD: Tensor, scale_T: Tensor | None) -> None:
        """Outputs of a network for some of its tokens, before the router's weights `scale`."""
        if down.name not in self.names:
            return
        network = network_of(down.name)
        energy_T = y_TD.float().square().sum(-1)
        self.energy.setdefault(network, []).append((index, energy_T if scale_T is None else energy_T * scale_T**2))
        self.peak[network] = max(self.peak.get(network, 0.0), float(y_TD.abs().amax()))

    def finish(self, hidden_WTD: Tensor) -> Spill:
        """What goes to the journal, given the layer's output."""
        weight_T = relative_weights(torch.cat([window.float().square().sum(-1) for (window,) in windows(hidden_WTD)]))
        shares = {network: _share(parts, weight_T) for network, parts in self.energy.items()}
        for name, facts in self.facts.items():
            network = network_of(name)
            whole = replace(facts, share=shares.get(network, 0.0), peak=self.peak.get(network, 0.0))
            self.offers.tensors[f"{name}.facts"] = torch.tensor(astuple(whole), dtype=torch.float64)
        return self.offers


def network_of(name: str) -> str:
    """The feed-forward network a matrix belongs to: its name without the projection."""
    return name.rpartition(".")[0]


def _share(parts: list[tuple[Tensor | int, Tensor]], weight_T: Tensor) -> float:
    total = 0.0
    for index, energy_T in parts:
        chosen = weight_T[index : index + len(energy_T)] if isinstance(index, int) else weight_T[index]
        total += float((energy_T * chosen).sum(dtype=torch.float64))
    return total / len(weight_T)
