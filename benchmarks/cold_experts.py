"""An expert that few tokens reach: its error on other tokens after solving, beside round-to-nearest and plain GPTQ.

    python benchmarks/cold_experts.py --model MODEL --tokens tokens.safetensors --out results.json

`tokens.safetensors` is what benchmarks/peers/tokens.py wrote. The source model reads its calibration windows once;
inputs and router weights of every expert of a few layers are kept. Each expert is then solved, as preset `default`
does it, from its first `--counts` tokens, and judged on its last `--held`: gate and up on the source's inputs,
down on what the solved gate and up make of them. What it leans on (`pool_kappa`) are the tokens of the layer before
those it is judged on, less its own beyond `--counts`; "alone" is the same without. The error is
E|W x - W^ x|^2 / E|W x|^2 with tokens weighted by their router weight squared. Both grids store BF16 scales and
zero-points for 64 columns. Only one stream is followed: neither the target correction nor what the stream lacks takes
part. Target: at most 0.85 of round-to-nearest where tokens are fewer than inputs.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from glm5_quant.calibrate.ffn import spread
from glm5_quant.eval.model_parts import decoder_layers, experts_of
from glm5_quant.model import load
from glm5_quant.quant.config import PRESETS, QuantConfig
from glm5_quant.quant.errors import relative_error
from glm5_quant.quant.grid import dequantize, minmax_grid, quantize
from glm5_quant.quant.rounding import solve
from glm5_quant.quant.shrinkage import Noise
from glm5_quant.quant.statistics import Moments
from glm5_quant.quant.target import few

PLAIN = "round-to-nearest"
METHODS: dict[str, QuantConfig | None] = {
    PLAIN: None,
    "gptq": replace(PRESETS["default"], shrink=False, descent_sweeps=0, pool_kappa=0.0),
    "alone": replace(PRESETS["default"], pool_kappa=0.0),
    "default": PRESETS["default"],
}


@dataclass
class Expert:
    """Inputs [T, D] and router weights [T] of the tokens that reach an expert, and its matrices [N, K].

    `layer_TD` holds all tokens of its layer, of which `row_T` are its own.
    """

    layer_TD: Tensor
    row_T: Tensor
    x_TD: Tensor
    weight_T: Tensor
    gate_up_NK: Tensor
    down_NK: Tensor
    activation: torch.nn.Module

    def hidden(self, x_TD: Tensor, gate_up_NK: Tensor) -> Tensor:
        """act(gate x) * (up x), [T, I]."""
        gate, up = (x_TD @ gate_up_NK.T).chunk(2, dim=-1)
        return self.activation(gate) * up


@torch.inference_mode()
def collect(model: torch.nn.Module, windows_WT: Tensor, wanted: list[int]) -> dict[tuple[int, int], Expert]:
    """The experts of the wanted layers with all tokens that reach them."""
    seen: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {layer: [] for layer in wanted}
    modules, handles = {}, []
    layers = decoder_layers(model)
    for layer in wanted:
        if layer >= len(layers) or experts_of(layers[layer]) is None:
            raise SystemExit(f"--layers: no experts in layer {layer} (the model has {len(layers)} layers)")
        modules[layer] = experts_of(layers[layer])
        keep = seen[layer]
        handles.append(
            modules[layer].register_forward_pre_hook(
                lambda module, args, kwargs, keep=keep: keep.append(tuple([*args, *kwargs.values()][:3])),
                with_kwargs=True,
            )
        )
    for ids in windows_WT:
        model.base_model(input_ids=ids[None], use_cache=False)
    for handle in handles:
        handle.remove()
    found = {}
    for layer, calls in seen.items():
        x, index, weights = (torch.cat([call[i].flatten(0, -2) for call in calls]) for i in range(3))
        module = modules[layer]
        for expert in range(len(module.down_proj)):
            rows, slot = (index == expert).nonzero(as_tuple=True)
            found[layer, expert] = Expert(
                x,
                rows,
                x[rows],
                weights[rows, slot],
                module.gate_up_proj[expert],
                module.down_proj[expert],
                module.act_fn,
            )
    return found


def moments(x_TK: Tensor, weight_T: Tensor | None = None) -> Moments:
    """Second moments of some tokens, weighted by router weight squared."""
    found = Moments.empty(x_TK.shape[1])
    found.add(x_TK, None if weight_T is None else weight_T.square())
    return found


def leaning(own: Moments, pool: Moments, config: QuantConfig | None) -> Moments:
    """An expert's moments as `calibrate` would have them: where its tokens are few, they lean on the layer's."""
    k = len(own.sum_KK)
    if config is not None and few(own.tokens, k):
        own.lean_on(pool, config.pool_kappa * k)
    return own


def rounded(weight_NK: Tensor, seen: Moments, config: QuantConfig | None) -> Tensor:
    """The dequantized weight of one method; None is round-to-nearest."""
    if config is None:
        grid = minmax_grid(weight_NK)
        return dequantize(quantize(weight_NK, grid), grid)
    noise = Noise.of(seen.hessian_KK, seen, seen.sample_TK)
    solved = solve(weight_NK, seen.hessian_KK, config, n_eff=seen.n_eff, noise=noise)
    return dequantize(solved.codes, solved.grid)


def errors(expert: Expert, count: int, last: int, config: QuantConfig | None) -> dict[str, float]:
    """Errors over its `last` tokens of an expert solved from its first `count`."""
    fit, held = slice(0, count), slice(-last, None)
    # As if no more than these had reached it.
    left_out = torch.zeros(len(expert.layer_TD), dtype=torch.bool)
    left_out[expert.row_T[count:]] = True
    left_out[expert.row_T[-last] :] = True
    pool_TD = expert.layer_TD[~left_out]
    seen = leaning(moments(expert.x_TD[fit], expert.weight_T[fit]), moments(pool_TD), config)
    first = rounded(expert.gate_up_NK, seen, config)
    hidden = expert.hidden(expert.x_TD, first)
    pooled = moments(expert.hidden(pool_TD[spread(pool_TD, expert.down_NK.shape[1])], first))
    second = rounded(expert.down_NK, leaning(moments(hidden[fit], expert.weight_T[fit]), pooled, config), config)
    judged = moments(expert.x_TD[held], expert.weight_T[held]), moments(hidden[held], expert.weight_T[held])
    whole = expert.hidden(expert.x_TD[held], expert.gate_up_NK) @ expert.down_NK.T
    lost = (hidden[held] @ second.T - whole).square().sum(-1) @ expert.weight_T[held].square()
    return {
        "gate and up": float(relative_error(expert.gate_up_NK, first, judged[0].hessian_KK)),
        "down": float(relative_error(expert.down_NK, second, judged[1].hessian_KK)),
        "output": float(lost / (whole.square().sum(-1) @ expert.weight_T[held].square())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, required=True, help="file that benchmarks/peers/tokens.py wrote")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 12, 21, 28])
    parser.add_argument("--counts", type=int, nargs="+", default=[64, 128, 256, 512], help="tokens to solve from")
    parser.add_argument("--held", type=int, default=4096, help="tokens to judge on")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = load(args.model, dtype=torch.float32)
    experts = collect(model, load_file(args.tokens)["calibration"][: args.windows], args.layers)
    needed = args.held + max(args.counts)
    experts = {place: one for place, one in experts.items() if len(one.x_TD) >= needed}
    if not experts:
        raise SystemExit(f"no expert has {needed} tokens: use more --windows")
    inputs = {"gate and up": next(iter(experts.values())).gate_up_NK.shape[1]}
    inputs["down"] = next(iter(experts.values())).down_NK.shape[1]
    print(f"{len(experts)} experts; inputs: gate and up {inputs['gate and up']}, down {inputs['down']}")
    print(
        "| tokens | matrix | error of round-to-nearest | plain GPTQ / it | alone / it | default / it | worst expert | "
        "above 0.85 |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    records = []
    with torch.inference_mode():
        plain = [errors(one, 1, args.held, None) for one in experts.values()]
        for count in args.counts:
            by_method = {
                name: plain if config is None else [errors(one, count, args.held, config) for one in experts.values()]
                for name, config in METHODS.items()
            }
            for matrix in ("gate and up", "down", "output"):
                values = {name: torch.tensor([one[matrix] for one in found]) for name, found in by_method.items()}
                base = values[PLAIN]
                ours, alone, gptq = (values[name] / base for name in ("default", "alone", "gptq"))
                cold = matrix in inputs and count < inputs[matrix]
                print(
                    f"| {count}{' (cold)' if cold else ''} | {matrix} | {base.mean():.5f} | {gptq.mean():.3f} | "
                    f"{alone.mean():.3f} | {ours.mean():.3f} | {ours.max():.3f} | "
                    f"{int((ours > 0.85).sum())} of {len(ours)} |"
                )
                records.append(
                    {"tokens": count, "matrix": matrix, "cold": cold, **{n: v.tolist() for n, v in values.items()}}
                )
    if args.out is not None:
        date = datetime.now(UTC).date().isoformat()
        args.out.write_text(json.dumps({"date": date, "model": args.model.name, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
