"""What integer activations cost: layer errors by kind of input, and KL to the source, of the same INT4 weights.

    python benchmarks/activations.py --source MODEL --tokens tokens.safetensors --export EXPORT [--channel EXPORT2] \\
        [--modes none int8 int4-block] [--windows 8] [--error-windows 2] [--json out.json]

EXPORT was calibrated without integer activations: its runtime is told to round inputs in each of the modes that need
nothing from calibration (`int8`, `int4-block`). EXPORT2 was calibrated with `--activations int4-channel`. Both run on
the reference backend, whose dots of integers are exact. Layer error: |W x - W^ Q(x)|^2 / |W x|^2, the mean over a
role's matrices, x the source's inputs on the first windows that calibration did not see; KL over the windows, with a
95% bootstrap interval over windows of its ratio to the W4A16 of EXPORT.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from glm5_quant.kernels.layout import Inputs
from glm5_quant.model import load
from glm5_quant.model.modules import PackedLinear

DYNAMIC = ("none", "int8", "int4-block")
DOWN = ("down_proj",)


def packed(model) -> dict[str, PackedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def switch(model, mode: str) -> None:
    """Let every packed matrix round its inputs in another mode."""
    for module in packed(model).values():
        n, k, resident, inputs = module._matrices["weight"]
        inputs = replace(inputs or Inputs(), activations=mode)
        module._matrices["weight"] = (n, k, resident, inputs)
        module._cache.clear()


@torch.inference_mode()
def layer_errors(source, model, tokens_WT: torch.Tensor) -> dict[str, float]:
    """By role, the mean over its matrices of |W x - W^ Q(x)|^2 / |W x|^2, x the source's inputs."""
    wrong, size = defaultdict(float), defaultdict(float)
    twins, handles = packed(model), []
    for name, module in source.named_modules():
        if name in twins:

            def hook(_, args, out, name=name):
                wrong[name] += float((twins[name](args[0]) - out).square().sum(dtype=torch.float64))
                size[name] += float(out.square().sum(dtype=torch.float64))

            handles.append(module.register_forward_hook(hook))
    for ids_T in tokens_WT:
        source(ids_T[None])
    for handle in handles:
        handle.remove()
    by_role = defaultdict(list)
    for name in wrong:
        by_role[name.rpartition(".")[2]].append(wrong[name] / size[name])
    return {role: sum(errors) / len(errors) for role, errors in by_role.items()}


@torch.inference_mode()
def window_kls(model, logs_WTV: list[torch.Tensor], tokens_WT: torch.Tensor) -> torch.Tensor:
    found = []
    for ids_T, log_TV in zip(tokens_WT, logs_WTV, strict=True):
        other_TV = model(ids_T[None]).logits[0].float().log_softmax(-1)
        found.append((log_TV.exp() * (log_TV - other_TV)).sum(-1).mean())
    return torch.stack(found)


def ratio_interval(kl_W: torch.Tensor, base_W: torch.Tensor) -> tuple[float, float]:
    """95% bootstrap interval over windows of mean KL relative to the base's."""
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(kl_W), (2000, len(kl_W)), generator=generator)
    ratios = (kl_W[picks].mean(1) / base_W[picks].mean(1)).sort().values
    return float(ratios[50]), float(ratios[1949])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--source", "--tokens", "--export"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--channel", type=Path)
    parser.add_argument(
        "--modes", nargs="*", choices=DYNAMIC, default=DYNAMIC, help="first: what others are held against"
    )
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--error-windows", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokens_WT = load_file(args.tokens)["evaluation"][: args.windows]
    source = load(args.source, dtype=torch.float32)
    with torch.inference_mode():
        logs = [source(ids_T[None]).logits[0].float().log_softmax(-1) for ids_T in tokens_WT]
    jobs = [(mode, args.export) for mode in args.modes] + ([("int4-channel", args.channel)] if args.channel else [])
    rows, base_W, loaded = [], None, {}
    for mode, folder in jobs:
        if folder not in loaded:
            loaded = {folder: load(folder, dtype=torch.float32, backend="reference")}
        model = loaded[folder]
        if mode in DYNAMIC:
            switch(model, mode)
        errors = layer_errors(source, model, tokens_WT[: args.error_windows])
        kl_W = window_kls(model, logs, tokens_WT)
        base_W = kl_W if base_W is None else base_W
        low, high = ratio_interval(kl_W, base_W)
        down = [errors[role] for role in errors if role in DOWN]
        other = [errors[role] for role in errors if role not in DOWN]
        row = {"mode": mode, "kl": float(kl_W.mean()), "kl_ratio": float(kl_W.mean() / base_W.mean())}
        row |= {"ratio_low": low, "ratio_high": high, "down": sum(down) / len(down), "other": sum(other) / len(other)}
        rows.append(row | {"roles": errors})
        print(json.dumps({k: v if isinstance(v, str | dict) else round(v, 5) for k, v in rows[-1].items()}), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
