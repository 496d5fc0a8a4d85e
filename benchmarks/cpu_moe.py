"""A mixture-of-experts layer on one CPU thread against bf16: how many times faster.

    python benchmarks/cpu_moe.py [--experts 16] [--top 8] [--hidden 2048] [--width 1024] [--tokens 1 4 16 32]

Contenders: the same layer in torch bf16 (each expert over its own tokens, as transformers computes it) and ours through
`dispatch.experts`, with exact tokens and with 8-bit ones. Goals: 3.2 / 4.7 / 5.6 times bf16 at 4 / 16 / 32
tokens.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial

import torch
from interleaved import interleave, machine, row
from torch import Tensor
from torch.nn import functional

from glm5_quant.kernels.dispatch import experts
from glm5_quant.kernels.layout import PackedMatrix, dequantize, from_codes


def random_stack(count: int, n: int, k: int, seed: int) -> PackedMatrix:
    """Experts with weights of a usual size, their grid in bf16."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (count, n, k), dtype=torch.uint8, generator=generator)
    scale = torch.rand(count, n, -(-k // 64), generator=generator).add_(0.5).mul_(0.01).bfloat16()
    return from_codes(codes, scale, torch.randint(6, 10, scale.shape, dtype=torch.uint8, generator=generator))


def plain_experts(x_TD: Tensor, index_TA: Tensor, weight_TA: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The layer in x's dtype from full matrices, expert by expert."""
    out_TD = torch.zeros_like(x_TD)
    for e in index_TA.unique().tolist():
        token, choice = (index_TA == e).nonzero(as_tuple=True)
        gate, up = functional.linear(x_TD[token], gate_up[e]).chunk(2, dim=-1)
        part = functional.linear(functional.silu(gate) * up, down[e]) * weight_TA[token, choice, None]
        out_TD.index_add_(0, token, part)
    return out_TD


def main() -> None:
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, value in (("experts", 16), ("top", 8), ("hidden", 2048), ("width", 1024), ("turns", 15)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 32])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    gate_up = random_stack(options.experts, 2 * options.width, options.hidden, 0)
    down = random_stack(options.experts, options.hidden, options.width, 1)
    wide_gate_up, wide_down = dequantize(gate_up, torch.bfloat16), dequantize(down, torch.bfloat16)
    eight = replace(gate_up, resident="int8"), replace(down, resident="int8")
    layer = f"{options.experts} experts of {options.hidden} x {options.width}, top {options.top}"
    print(f"\n{layer}: times bf16 (milliseconds of CPU)\n")
    print("| tokens | bf16 | ours int4 | ours int8 |\n|---|---|---|---|")
    for tokens in options.tokens:
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, options.hidden, generator=generator).bfloat16()
        index = torch.rand(tokens, options.experts, generator=generator).topk(options.top, dim=-1).indices
        weight = torch.full((tokens, options.top), 1 / options.top).bfloat16()
        timings = interleave(
            {
                "bf16": partial(plain_experts, x, index, weight, wide_gate_up, wide_down),
                "int4": partial(experts, x, index, weight, gate_up, down, backend="cpu"),
                "int8": partial(experts, x, index, weight, *eight, backend="cpu"),
            },
            options.turns,
        )
        print(row(str(tokens), timings, "bf16"), flush=True)


if __name__ == "__main__":
    main()
