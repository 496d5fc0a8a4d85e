"""Which windows to calibrate on, where the data hold more than are wanted (EAMPQ step 2, after EAQuant).

Dimensions: W windows, T tokens of a window, D hidden, L layers with experts, E experts of a layer.
Who is routed where is known only by running: one pass of the source model over all candidates, from the embedding to
the last router, without statistics. Then windows are taken one by one, each time the one that helps starved experts
most. The pass is a whole forward over the candidates, so it is switched on by hand.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from glm5_quant.calibrate.coverage import by_expert
from glm5_quant.calibrate.ffn import Network
from glm5_quant.calibrate.plan import Plan
from glm5_quant.calibrate.settings import Settings
from glm5_quant.calibrate.stream import scratch
from glm5_quant.calibrate.taps import BlockReached, linear
from glm5_quant.model.families import Linear, read_linear
from glm5_quant.model.journal import Journal, SamplesRecord, read_model, write_record
from glm5_quant.model.layers import LayerRunner

EVEN_SHARES = 2


def chosen_windows(
    runner: LayerRunner, plan: Plan, journal: Journal, settings: Settings, ids_WT: Tensor, activation: Any
) -> Tensor:
    """The windows to calibrate on, int64 [num_samples, T]: those the journal names, or chosen now.

    All but the first are left out where there is nothing to choose by: in a model without experts.
    """
    if len(ids_WT) <= settings.num_samples or not plan.experts:
        return ids_WT[: settings.num_samples]
    if journal.samples_file.exists():
        record = read_model(journal.samples_file, SamplesRecord)
    else:
        record = _choose(runner, plan, journal, settings, ids_WT, activation)
        write_record(journal.samples_file, record)
    return ids_WT[record.chosen]


def _choose(
    runner: LayerRunner, plan: Plan, journal: Journal, settings: Settings, ids_WT: Tensor, activation: Any
) -> SamplesRecord:
    counts_LWE = count_routes(runner, plan, journal, ids_WT, activation)
    even = settings.num_samples * int(counts_LWE.sum(-1).max()) / plan.experts
    goal = max(float(settings.coverage_target), EVEN_SHARES * even)
    chosen = pick(counts_LWE, settings.num_samples, goal)
    return SamplesRecord(
        candidates=len(ids_WT),
        chosen=chosen,
        before=counts_LWE[:, : settings.num_samples].sum(1).tolist(),
        after=counts_LWE[:, chosen].sum(1).tolist(),
    )


def pick(counts_LWE: Tensor, wanted: int, goal: float) -> list[int]:
    """Greedy choice of windows, ascending. Each step takes the window that raises the sum over all experts of
    log(1 + tokens) most, tokens beyond `goal` not counted; the first wins a tie.

    The sum is submodular, so the greedy choice is within 1 - 1/e of the best one.
    """
    each_WN = counts_LWE.movedim(1, 0).flatten(1).float()
    left = torch.ones(len(each_WN), dtype=torch.bool)
    have_N = torch.zeros(each_WN.shape[1])
    for _ in range(min(wanted, len(each_WN))):
        gain_W = torch.log1p((have_N + each_WN).clamp(max=goal)).sum(1, dtype=torch.float64)
        best = int(gain_W.masked_fill(~left, -1.0).argmax())
        left[best] = False
        have_N += each_WN[best]
    return torch.nonzero(~left).flatten().tolist()


@torch.no_grad()
def count_routes(runner: LayerRunner, plan: Plan, journal: Journal, ids_WT: Tensor, activation: Any) -> Tensor:
    """How many tokens of each window the source model sends to each expert, int32 [L, W, E]."""
    windows, seqlen = ids_WT.shape
    shape = (windows, seqlen, runner.config.hidden_size)
    (journal.folder / "stream").mkdir(exist_ok=True)
    hidden_WTD = scratch(journal.folder / "stream", shape, runner.dtype)
    chunks = plan.chunks(windows)
    for first, last in chunks:
        hidden_WTD[first:last] = runner.embed(ids_WT[first:last])
    kwargs = {last - first: runner.kwargs_for(ids_WT[first:last]) for first, last in chunks}
    sparse = [layer for layer, items in plan.by_layer.items() if any(item.expert is not None for item in items)]
    counts, side = [], dict[int, Any]()
    for layer in range(max(sparse) + 1):
        module = runner.load_layer(layer, experts=False)
        experts = None
        if layer in sparse:
            items = [item for item in plan.by_layer[layer] if item.expert is not None]
            experts = _SourceExperts(runner, items, plan.experts, activation, stop=layer == max(sparse))
            module.set_submodule(f"{runner.family.block}.{runner.family.experts}", experts)
        for number, (first, last) in enumerate(chunks):
            with suppress(BlockReached):
                hidden_WTD[first:last], side[number] = runner.run_layer(
                    module, hidden_WTD[first:last], kwargs[last - first][layer], side.get(number)
                )
        if experts is not None:
            counts.append(experts.counts(seqlen))
    return torch.stack(counts)


class _SourceExperts(nn.Module):
    """The source's routed experts, one in memory at a time, counting who is sent where. With `stop` it breaks the
    forward off instead of computing: after the last router nothing is of interest."""

    def __init__(self, runner: LayerRunner, items: list[Linear], experts: int, activation: Any, *, stop: bool) -> None:
        super().__init__()
        self.runner, self.experts, self.activation, self.stop = runner, experts, activation, stop
        self.items = {(item.expert, item.role): item for item in items}
        self.chosen: list[Tensor] = []

    def counts(self, seqlen: int) -> Tensor:
        """int32 [W, E]"""
        chosen_WN = torch.cat(self.chosen).view(-1, seqlen * self.chosen[0].shape[-1]).long()
        ones_WN = ((chosen_WN >= 0) & (chosen_WN < self.experts)).int()
        zeros_WE = torch.zeros(len(chosen_WN), self.experts, dtype=torch.int32)
        return zeros_WE.scatter_add_(1, chosen_WN.clamp(0, self.experts - 1), ones_WN)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        flat_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        chosen_TK = top_k_index.reshape(len(flat_TD), -1)
        self.chosen.append(chosen_TK)
        if self.stop:
            raise BlockReached
        routed = by_expert(chosen_TK, top_k_weights.reshape(len(flat_TD), -1).float(), self.experts)
        out_TD = torch.zeros(flat_TD.shape)
        for expert, (index_T, scale_T) in enumerate(zip(routed.index, routed.scale, strict=True)):
            if len(index_T):
                out_TD.index_add_(0, index_T, self._expert(expert, flat_TD[index_T]) * scale_T[:, None])
        return out_TD.to(hidden_states.dtype).view(hidden_states.shape)

    def _expert(self, expert: int, x_TD: Tensor) -> Tensor:
        dtype, checkpoint = self.runner.dtype, self.runner.checkpoint
        network = Network(
            inputs=[self.items[expert, "gate"], self.items[expert, "up"]],
            down=self.items[expert, "down"],
            read=lambda item: read_linear(checkpoint, item),
            activation=self.activation,
        )
        hidden_TI = network.hidden(x_TD, [network.read(item) for item in network.inputs], dtype)
        return linear(hidden_TI, network.read(network.down), None, dtype)
