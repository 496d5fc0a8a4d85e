"""A layer's router fitted again to the stream it will really read (EAMPQ step 8), kept only if that helps.

Dimensions: T tokens, D hidden, E experts, A experts a token chooses.
W* = W + s W G (H + delta I)^-1, the ridge regression of the source's router logits on the quantized stream's inputs, as
for any other target (quant/target.py), in full or part strength s. Held-out tokens judge it by what counts: how many
of the experts that the source model chooses are chosen again. The strength is picked on one half of them and has to
raise agreement on the other half too. The correction bias of the router is never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from glm5_quant.calibrate.evidence import Evidence
from glm5_quant.calibrate.stream import token_parts
from glm5_quant.model.checkpoint import DTYPES
from glm5_quant.model.families import disk_name
from glm5_quant.model.journal import RouterRecord
from glm5_quant.quant.target import target_direction

if TYPE_CHECKING:
    from glm5_quant.calibrate.context import Context

STRENGTHS = (1.0, 0.5, 0.25)

# The experts [T, A] that the block's own code chooses for inputs [T, D].
Route = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Refit:
    """What a layer's refit came to; `tensors` holds the new weight under its name on disk, where it was kept."""

    record: RouterRecord | None = None
    notes: list[str] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def refit_layer(
    context: Context, index: int, module: nn.Module, flat: Mapping[str, Tensor], chosen_TA: Tensor, route: Route
) -> Refit:
    """Fit the router of layer `index` to the quantized stream. `flat`: the block's inputs [T, D] in both streams;
    `chosen_TA`: what the source chose."""
    family = context.runner.family
    path = f"{family.block}.{family.router}"
    router = module.get_submodule(path)
    weight = dict(router.named_parameters(recurse=False)).get("weight")
    name = disk_name(context.checkpoint, family, f"model.layers.{index}.{path}.weight")
    if weight is None or weight.ndim != 2 or name is None:
        return Refit(notes=["router kept: it is no single matrix"])
    if "source" not in flat or not context.held_windows:
        return Refit(notes=["router kept: no second stream, or no token held out, to fit and judge it by"])
    x_TD, first = flat["quantized"], context.held_from
    evidence = Evidence.empty(
        x_TD.shape[1], tokens=len(x_TD), held_from=first, gap=True, device=context.settings.device
    )
    for part in token_parts(first, context.chunk_tokens):
        evidence.add(x_TD[part], flat["source"][part], part.start)
    stored = DTYPES.get(context.checkpoint.info(name).dtype, torch.float32)
    delta = context.settings.quant.target_delta
    record, new = refit_router(router, evidence, route, (x_TD[first:], chosen_TA[first:]), stored, delta)
    return Refit(record=record, tensors={} if new is None else {name: new})


def refit_router(
    router: nn.Module,
    evidence: Evidence,
    route: Route,
    held: tuple[Tensor, Tensor],
    stored: torch.dtype,
    delta: float,
) -> tuple[RouterRecord, Tensor | None]:
    """What a refit came to, and the new weight [E, D] in the dtype `stored` where it is kept; the router itself keeps
    whichever weight won.

    Args:
        evidence: moments of the block's inputs, with the gap between the streams, of the tokens that are fitted on.
        held: the quantized stream's inputs of held-out tokens [T, D], and what the source chose for them [T, A].
    """
    (part,) = evidence.parts
    old = router.get_parameter("weight")
    weight = old.detach().float()
    assert part.fit.gap_KK is not None
    direction = target_direction(weight, part.fit.hessian_KK, part.fit.gap_KK, delta)
    x_TD, chosen_TA = held
    half = len(x_TD) // 2
    first, second = (x_TD[:half], chosen_TA[:half]), (x_TD[half:], chosen_TA[half:])

    def agreement_with(strength: float, tokens: tuple[Tensor, Tensor]) -> float:
        new = (weight + strength * direction).to(stored)
        router.weight = nn.Parameter(new.to(old.dtype), requires_grad=False)
        return agreement(route(tokens[0]), tokens[1])

    before = [agreement_with(0.0, part) for part in (first, second)]
    best = max(STRENGTHS, key=lambda strength: agreement_with(strength, first))
    after = [agreement_with(best, part) for part in (first, second)]
    kept = all(new > was for new, was in zip(after, before, strict=True))
    if not kept:
        router.weight = old
    record = RouterRecord(
        kept=kept, strength=best, agreement_before=sum(before) / 2, agreement_after=sum(after) / 2, tokens=len(x_TD)
    )
    return record, (weight + best * direction).to(stored) if kept else None


def agreement(chosen_TA: Tensor, wanted_TA: Tensor) -> float:
    """Mean share of the wanted experts of a token that are among the chosen ones."""
    hit_TA = (chosen_TA[:, :, None] == wanted_TA[:, None, :]).any(1)
    return float(hit_TA.float().mean())
