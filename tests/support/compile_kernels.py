"""Compile every kernel ahead of time for a GPU that is not there, and count what the machine code does.

Run as a program in a process without TRITON_INTERPRET: ``python compile_kernels.py cuda 90``, JSON on stdout: for each
kernel and setting the registers spilled, and for sm_90 the main loop's instructions per weight, opcodes and load widths.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from glm5_quant.kernels import linear_triton
from glm5_quant.kernels.table import Config, config_for

WARP = {"cuda": 32, "hip": 64}
STRIDES = (
    "x_stride",
    "codes_stride",
    "scale_stride",
    "zero_stride",
)  # multiples of 16 in real use, as the launcher would find


def compile_one(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], config: Config, target: tuple
) -> Any:
    names = [parameter.name for parameter in kernel.params]
    full = {name: "constexpr" if name in constants else signature[name] for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if full[n][0] == "*" or n in STRIDES}
    source = ASTSource(fn=kernel, signature=full, constexprs=constants, attrs=aligned)
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return triton.compile(source, target=GPUTarget(*target), options=options)


def sass(compiled: Any) -> tuple[list[str], dict[str, int], str]:
    """Instructions, label positions, and the resource-usage line."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tools / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
        usage = subprocess.run([tools / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True).stdout
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = len(instructions)
        elif code := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(re.sub(r"^@!?U?P\w+\s+", "", code[1]).strip())
    return instructions, labels, usage


def main_loop(instructions: list[str], labels: dict[str, int]) -> list[str]:
    """The longest backward branch's body."""
    best: list[str] = []
    for at, code in enumerate(instructions):
        target = re.search(r"^BRA.*?(\.L\w+)", code)
        if target and labels.get(target[1], at) < at and at - labels[target[1]] > len(best):
            best = instructions[labels[target[1]] : at + 1]
    return best


def report(compiled: Any, config: Config, weights: int) -> dict[str, Any]:
    instructions, labels, usage = sass(compiled)
    loop = main_loop(instructions, labels)
    names = Counter(code.split()[0] for code in loop)
    stack = re.search(r"STACK:(\d+)", usage)
    return {
        "per_weight": round(len(loop) * config.warps * 32 / weights, 2),
        "stack_bytes": int(stack[1]) if stack else -1,
        "registers": int(match[1]) if (match := re.search(r"REG:(\d+)", usage)) else -1,
        "shared_bytes": compiled.metadata.shared,
        "opcodes": dict(names),
        "local": sum(code.startswith(("LDL", "STL")) for code in instructions),
    }


def linear_cases(half: str) -> list[tuple[str, Any, dict[str, str], dict[str, Any], Config]]:
    signature = {
        **dict.fromkeys(("x_ptr", "scale_ptr", "residual_ptr"), half), **dict.fromkeys(("codes_ptr", "zero_ptr"), "*u8"),
        "parts_ptr": "*fp32", "columns_ptr": "*i32", "factor_ptr": "*fp32",
        **dict.fromkeys(("tokens", "n", "blocks", "x_stride", "codes_stride", "scale_stride", "zero_stride"), "i32"),
        "shadow_columns": "i32", "pairs_per_split": "i32",
    }  # fmt: skip
    cases = []
    for tokens in (8, 16, 64, 128):
        config = config_for("linear", tokens, 2048, 6144)
        for even, shadow in ((True, False), (False, True)):
            constants = {
                "BLOCK_R": config.block_r, "BLOCK_T": config.block_t, "LEFT": config.block_t <= 16, "EVEN_B": even,
                "SHADOW": shadow, "INT8": False,
            }  # fmt: skip
            name = f"linear {half[1:]} {tokens}" + (" ragged shadow" if shadow else "")
            cases.append((name, linear_triton._w4a16, signature, constants, config))
    return cases


def main(backend: str, arch: str) -> None:
    target = (backend, int(arch) if backend == "cuda" else arch, WARP[backend])
    found = {}
    for half in ("*fp16", "*bf16"):
        for name, kernel, signature, constants, config in linear_cases(half):
            constants = {**constants, "ASM": backend == "cuda"} if "ASM" in kernel.arg_names else constants
            compiled = compile_one(kernel, signature, constants, config, target)
            found[name] = {"binary": len(compiled.asm["cubin" if backend == "cuda" else "hsaco"])}
            if target[:2] == ("cuda", 90) and "BLOCK_R" in constants:
                found[name] |= report(compiled, config, constants["BLOCK_R"] * 128)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
