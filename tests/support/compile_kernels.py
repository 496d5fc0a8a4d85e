"""Compile every kernel ahead of time for a GPU that is not there, and count what the machine code does.

Run as a program in a process without TRITON_INTERPRET, JSON on stdout: ``python compile_kernels.py cuda 90 "linear fp16
8"`` gives the binary's size and, for sm_90, what its machine code shows: stack, registers, the main loop's instructions
per weight and its opcodes.
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

from glm5_quant.kernels import experts_triton, int8_triton, linear_triton
from glm5_quant.kernels.table import Config, config_for

WARP = {"cuda": 32, "hip": 64}
# Multiples of 16 in real use, as the launcher would find.
STRIDES = ("x_stride", "q_stride", "codes_stride", "scale_stride", "zero_stride", "hidden_stride")


def compile_one(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], config: Config, target: tuple
) -> Any:
    names = [parameter.name for parameter in kernel.params]
    full = {name: "constexpr" if name in constants else signature[name] for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if full[n][0] == "*" or n in STRIDES}
    source = ASTSource(fn=kernel, signature=full, constexprs=constants, attrs=aligned)
    options = {"num_warps": config.warps, "num_stages": config.stages}
    if kernel is int8_triton._quantize:
        options = int8_triton.EXACT
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


def pointers(half: str) -> dict[str, str]:
    """The type of every argument any kernel has; what is not named here is an int32."""
    return {
        **dict.fromkeys(("x_ptr", "scale_ptr", "residual_ptr", "hidden_ptr", "weight_ptr"), half),
        **dict.fromkeys(("codes_ptr", "zero_ptr"), "*u8"),
        **dict.fromkeys(("parts_ptr", "factor_ptr", "x_scale_ptr"), "*fp32"),
        **dict.fromkeys(("columns_ptr", "pair_ptr", "expert_ptr", "offsets_ptr", "sums_ptr"), "*i32"),
        "q_ptr": "*i8",
    }


def case(name: str, asm: bool) -> tuple[Any, dict[str, str], dict[str, Any], Config, int]:
    """Kernel, argument types, constants, setting, weights of a main-loop step; name: "kernel half tokens [options]"."""
    kind, half, tokens, *extra = name.split()
    kernels = {
        "linear": linear_triton._w4a16, "gate_up": experts_triton._gate_up, "down": experts_triton._down,
        "int8": int8_triton._w4a8, "quantize": int8_triton._quantize,
    }  # fmt: skip
    kernel, config = kernels[kind], config_for(kind, int(tokens), 2048, 6144)
    types = pointers(f"*{half}")
    signature = {parameter.name: types.get(parameter.name, "i32") for parameter in kernel.params}
    wanted = {
        "BLOCK_R": config.block_r, "BLOCK_T": config.block_t, "BLOCK_M": config.block_t, "LEFT": config.block_t <= 16,
        "EVEN_B": "ragged" not in extra, "SHADOW": "shadow" in extra, "INT8": False, "BY_BLOCK": "block" in extra,
        "ASM": asm, "LEVELS": 15, "SYMMETRIC": "block" not in extra, "BLOCKS": 128,
    }  # fmt: skip
    constants = {key: value for key, value in wanted.items() if key in signature}
    return kernel, signature, constants, config, config.block_r * 128


def main(backend: str, arch: str, *names: str) -> None:
    target = (backend, int(arch) if backend == "cuda" else arch, WARP[backend])
    found = {}
    for name in names:
        kernel, signature, constants, config, weights = case(name, asm=backend == "cuda")
        compiled = compile_one(kernel, signature, constants, config, target)
        found[name] = {"binary_bytes": len(compiled.asm["cubin" if backend == "cuda" else "hsaco"])}
        if target[:2] == ("cuda", 90):
            found[name] |= report(compiled, config, weights)
            found[name]["ptx"] = dict(
                Counter(re.findall(r"^\s+(?:@%p\d+ )?((?:div|fma)[\w.]+)", compiled.asm["ptx"], re.M))
            )
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
