"""INT4 kernels on a GPU: correctness first, then times against torch bf16 and against the memory's own limit.

    python benchmarks/gpu.py [--out result.json]      # needs no installed package; no time is begun after --budget-s
    TRITON_INTERPRET=1 python benchmarks/gpu.py --smoke   # the correctness part alone, on a CPU

No time is reported when a number is wrong. Times are medians of CUDA graph replays over several matrices that together
do not fit the L2 cache. The floor is the bytes that must be read (codes, scales, zero-points, tokens, results) over the
copy bandwidth measured in the same run. Goals stand beside what is found. Every row goes to stderr, and all so far to
--out, as soon as it is known: a run that is cut off leaves what it found.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

try:
    import glm5_quant  # noqa: F401
except ImportError:  # a lent machine has this folder and nothing installed
    root = Path(__file__).resolve().parents[1]
    package = types.ModuleType("glm5_quant")
    package.__path__ = [str(root / "src/glm5_quant"), str(root)]
    sys.modules["glm5_quant"] = package

from glm5_quant.kernels.dispatch import experts, has_triton, linear
from glm5_quant.kernels.layout import Inputs, PackedMatrix, Shadow, block_count, dequantize, padded_k

DENSE_GOALS = {1: 2.6, 16: 2.6, 32: 2.2, 64: 1.6, 128: 1.0, 1024: 0.85, 4096: 0.85}  # times torch bf16
MOE_GOALS_US = {1: 63, 16: 650, 64: 1350, 256: 1650}
DENSE_SHAPES = ((2048, 6144), (6144, 2048), (6144, 12288))
GLM5 = {"experts": 256, "hidden": 6144, "width": 2048, "top": 8}
MOE_TOKENS = (1, 16, 64, 256, 1024, 4096)
L2_BYTES = 256 << 20
BOUND = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


def matrix(n: int, k: int, device: str, dtype: torch.dtype, lead: tuple[int, ...] = ()) -> PackedMatrix:
    """Random codes with a grid of usual size."""
    codes = torch.randint(0, 256, (*lead, n, padded_k(k) // 2), dtype=torch.uint8, device=device)
    scale = torch.rand(*lead, n, block_count(k), device=device).add_(0.5).mul_(0.01).to(dtype)
    zero = torch.randint(6, 10, scale.shape, dtype=torch.uint8, device=device)
    return PackedMatrix(codes, scale, zero, n, k)


def shadow(counts: list[int], n: int, k: int, device: str) -> Shadow:
    """FP16 residual columns, so many for each expert."""
    total = sum(counts)
    offsets = torch.tensor([0, *counts]).cumsum(0).to(device=device, dtype=torch.int32)
    columns = torch.randint(0, k, (total,), dtype=torch.int32, device=device)
    return Shadow(columns, torch.randn(total, n, device=device).mul_(0.01).half(), offsets)


def routing(tokens: int, count: int, top: int, device: str) -> tuple[Tensor, Tensor]:
    """Distinct random experts a token, equal weights."""
    index = torch.rand(tokens, count, device=device).topk(top, dim=-1).indices
    return index, torch.full((tokens, top), 1 / top, device=device)


def check(device: str, dtypes: list[torch.dtype], wide: int) -> Iterator[dict[str, Any]]:
    """Every kernel against the exact reference; ragged shapes, shadows, every tile, activations of fewer bits."""
    for dtype in dtypes:
        for n, k, extra in ((wide, 2 * wide, False), (wide + 8, wide + 37, True)):
            packed = matrix(n, k, device, dtype)
            with_shadow = PackedMatrix(packed.codes, packed.scale, packed.zero, n, k, shadow([5], n, k, device))
            eight = PackedMatrix(packed.codes, packed.scale, packed.zero, n, k, inputs=Inputs(activations="int8"))
            used = with_shadow if extra else packed
            for tokens in (1, 7, 9, 33, 129):
                x = torch.randn(tokens, k, device=device).to(dtype)
                for name, chosen in (("linear", used), ("int8", eight)):
                    run = partial(linear, packed=chosen)
                    yield compare(f"{name} {dtype} {n}x{k} {tokens}", dtype, x, run)
        d, i, count = wide, wide // 2, 5
        gate_up, down = matrix(2 * i, d, device, dtype, (count,)), matrix(d, i, device, dtype, (count,))
        for tokens in (1, 17, 65, 257):
            index, weight = routing(tokens, count, 2, device)
            index[0, 0] = count
            x = torch.randn(tokens, d, device=device).to(dtype)
            run = partial(experts, index_TA=index, weight_TA=weight, gate_up=gate_up, down=down)
            yield compare(f"experts {dtype} {tokens}", dtype, x, run)


def compare(name: str, dtype: torch.dtype, x: Tensor, run: Callable[..., Tensor]) -> dict[str, Any]:
    """Relative error of the Triton result against the exact one; a kernel that fails is one that is not right."""
    try:
        exact, found = run(x.float(), backend="reference").double(), run(x, backend="triton").double()
    except Exception as failure:  # Triton and CUDA raise kinds of their own, and the other kernels are to be seen too
        return {"name": name, "failed": f"{type(failure).__name__}: {failure}", "right": False}
    error = float((found - exact).norm() / exact.norm())
    return {"name": name, "error": error, "right": error < BOUND[dtype]}


def replayed_us(calls: list[Callable[[], object]], repeats: int = 12) -> float:
    """Median microseconds of one call, replaying a CUDA graph that runs all of them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # which may not have made the tensors yet
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(1000 * start.elapsed_time(stop) / len(calls))
    return statistics.median(times)


def bandwidth() -> float:
    """Bytes a second of a large copy, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (replayed_us([lambda: target.copy_(source)]) / 1e6)


def packed_bytes(packed: PackedMatrix) -> int:
    """Bytes of codes and grid."""
    return sum(part.numel() * part.element_size() for part in (packed.codes, packed.scale, packed.zero))


def time_dense(bytes_per_s: float, deadline: float) -> Iterator[dict[str, Any]]:
    """Dense shapes: ours, torch bf16, floor."""
    for n, k in DENSE_SHAPES:
        copies = -(-L2_BYTES // (n * k // 2))
        packed = [matrix(n, k, "cuda", torch.bfloat16) for _ in range(copies)]
        full = [dequantize(m, torch.bfloat16) for m in packed[: -(-copies // 4)]]
        for tokens, goal in DENSE_GOALS.items():
            if time.monotonic() > deadline:
                yield {"shape": f"{n}x{k}", "tokens": tokens, "left_out": "no time left"}
                continue
            x = torch.randn(tokens, k, device="cuda").bfloat16()
            ours = replayed_us([partial(linear, x, one) for one in packed])
            torch_us = replayed_us([partial(functional.linear, x, one) for one in full])
            floor = 1e6 * (packed_bytes(packed[0]) + 2 * tokens * (n + k)) / bytes_per_s
            ratio = torch_us / ours
            row = {"shape": f"{n}x{k}", "tokens": tokens, "times_bf16": ratio, "goal": goal, "reached": ratio >= goal}
            yield row | {"ours_us": ours, "bf16_us": torch_us, "floor_us": floor}
        del packed, full


def plain_experts(x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The layer in torch bf16: pairs sorted by expert, grouped matrix products where torch has them."""
    flat, order = index.reshape(-1).sort(stable=True)
    ends = torch.searchsorted(flat, torch.arange(gate_up.shape[0], device=x.device), right=True).to(torch.int32)
    token = order // index.shape[1]
    gate, up = torch._grouped_mm(x[token], gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    part = torch._grouped_mm(functional.silu(gate) * up, down.transpose(1, 2), offs=ends)
    return torch.zeros_like(x).index_add_(0, token, part * weight.reshape(-1, 1)[order].to(x.dtype))


def time_moe(bytes_per_s: float, deadline: float) -> Iterator[dict[str, Any]]:
    """A GLM-5 layer's routed experts: ours, torch bf16 with grouped products, floor over the experts that are used."""
    count, d, i, top = GLM5["experts"], GLM5["hidden"], GLM5["width"], GLM5["top"]
    gate_up, down = (matrix(n, k, "cuda", torch.bfloat16, (count,)) for n, k in ((2 * i, d), (d, i)))
    full = [torch.randn(count, n, k, device="cuda", dtype=torch.bfloat16).mul_(0.02) for n, k in ((2 * i, d), (d, i))]
    for tokens in MOE_TOKENS:
        if time.monotonic() > deadline:
            yield {"tokens": tokens, "left_out": "no time left"}
            continue
        index, weight = routing(tokens, count, top, "cuda")
        x = torch.randn(tokens, d, device="cuda").bfloat16()
        ours = replayed_us([partial(experts, x, index, weight, gate_up, down)])
        try:
            torch_us = replayed_us([partial(plain_experts, x, index, weight, *full)])
        except (RuntimeError, AttributeError) as error:
            torch_us = float("nan")
            print(f"torch bf16 experts at {tokens} tokens: {error}", file=sys.stderr)
        used = int(index.unique().numel()) / count * (packed_bytes(gate_up) + packed_bytes(down))
        floor = 1e6 * (used + tokens * top * 2 * (d + i) + 2 * tokens * d) / bytes_per_s
        goal = MOE_GOALS_US.get(tokens)
        row = {"tokens": tokens, "ours_us": ours, "bf16_us": torch_us, "floor_us": floor, "goal_us": goal}
        yield row | {"reached": None if goal is None else ours <= goal}


def fill(result: dict[str, Any], part: str, rows: Iterator[dict[str, Any]], out: Path | None) -> None:
    """Add a part of the result row by row, each shown and written at once."""
    result[part] = []
    for row in rows:
        result[part].append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        if out:
            out.write_text(json.dumps(result, indent=1) + "\n")


def unable(smoke: bool) -> str:
    """Why nothing can be measured here, or nothing."""
    if not has_triton():
        return "the triton package is not installed"
    if smoke:
        return "" if os.environ.get("TRITON_INTERPRET") == "1" else "--smoke needs TRITON_INTERPRET=1"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 is set: kernels would run on the CPU; unset it, or add --smoke"
    return "" if torch.cuda.is_available() else "no GPU found; TRITON_INTERPRET=1 with --smoke needs none"


def main() -> int:
    """Print JSON; 1 if a number was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="correctness only, small, fp16, on the CPU")
    parser.add_argument("--out", type=Path, help="file for the result, kept up to date as the run goes on")
    parser.add_argument("--budget-s", type=float, default=420.0, help="no time is begun after so many seconds")
    options = parser.parse_args()
    if reason := unable(options.smoke):
        raise SystemExit(f"benchmarks/gpu.py: {reason}")
    started = time.monotonic()
    torch.manual_seed(0)
    result: dict[str, Any] = {"device": "interpreter"}
    if not options.smoke:
        import triton

        result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    checked = ("cpu", [torch.float16], 64) if options.smoke else ("cuda", [torch.float16, torch.bfloat16], 512)
    fill(result, "checks", check(*checked), options.out)
    right = all(row["right"] for row in result["checks"])
    if right and not options.smoke:
        result["bandwidth_bytes_per_s"] = bytes_per_s = bandwidth()
        deadline = started + options.budget_s
        fill(result, "moe", time_moe(bytes_per_s, deadline), options.out)
        torch.cuda.empty_cache()
        fill(result, "dense", time_dense(bytes_per_s, deadline), options.out)
    result |= {"all_right": right, "seconds": round(time.monotonic() - started, 1)}
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
