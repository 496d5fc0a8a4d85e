"""glm5-tiny in a form that other people's quantizers can take: every matrix of every expert a Linear of its own.

No peer knows its architecture. The runners call `load`; the scorer calls `fuse` on what a peer wrote. The peer's venv
needs transformers 5.24 and glm5_quant (`pip install --no-deps .`).
"""

import json
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

# What stays in the source's precision: gates and mask predictors, as in our exports.
KEPT = ("mlp.gate.", "mask_predictor")


class Expert(nn.Module):
    """down(silu(gate x) * up x), as glm5_quant.model.glm5.experts computes it from stacks."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        gate, up = gate_up.chunk(2)
        self.gate_proj, self.up_proj, self.down_proj = (linear(weight) for weight in (gate, up, down))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD))


class Experts(nn.ModuleList):
    """Each expert on the tokens routed to it; with `all_seen` on every token, the output being the same."""

    all_seen = False

    def forward(self, x_TD: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
        out_TD = torch.zeros_like(x_TD)
        for number, expert in enumerate(self):
            token, place = torch.where(index_TK == number)
            out = expert(x_TD)[token] if self.all_seen else expert(x_TD[token])
            out_TD.index_add_(0, token, out * weight_TK[token, place, None].to(x_TD.dtype))
        return out_TD


def linear(weight: torch.Tensor) -> nn.Linear:
    made = nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype)
    made.weight.data.copy_(weight)
    return made


def is_glm5(folder: Path) -> bool:
    return json.loads((folder / "config.json").read_text())["model_type"] == "glm5_ref"


def register() -> None:
    from glm5_quant.model import glm5

    glm5.register()


def load(folder: Path, *, all_experts: bool = False):
    """The model in its own dtype, experts unstacked. `all_experts`: every expert sees every token."""
    from transformers import AutoModelForCausalLM

    register()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    for layer in model.model.layers:
        stacks = zip(layer.mlp.experts.gate_up_proj.detach(), layer.mlp.experts.down_proj.detach(), strict=True)
        layer.mlp.experts = Experts(Expert(*pair) for pair in stacks)
        layer.mlp.experts.all_seen = all_experts
    return model


def fuse(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by plain name with experts stacked again; those that are stacked already stay."""
    parts: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    rest = {}
    for name, tensor in tensors.items():
        before, found, after = name.partition(".experts.")
        number, _, role = after.removesuffix(".weight").partition(".")
        if found and number.isdigit():
            parts.setdefault(f"{before}.experts", {}).setdefault(int(number), {})[role] = tensor
        else:
            rest[name] = tensor
    for path, experts in parts.items():
        ordered = [experts[number] for number in range(len(experts))]
        rest[f"{path}.gate_up_proj"] = torch.stack([torch.cat([e["gate_proj"], e["up_proj"]]) for e in ordered])
        rest[f"{path}.down_proj"] = torch.stack([e["down_proj"] for e in ordered])
    return rest
