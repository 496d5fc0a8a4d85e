"""A whole model on one CPU thread: greedy tokens a second, prefill, and peak memory, ours against transformers.

    python benchmarks/cpu_decode.py SOURCE_FOLDER EXPORT_FOLDER [--prompt 64] [--new 32] [--rounds 3]

Each contender runs in processes of its own, by turns, `rounds` times; medians. Times are CPU seconds of the one thread,
which a busy machine stretches less than wall time. Peak memory is the process's highest resident size (VmHWM), which
counts PyTorch itself (about 0.4 GB) for everyone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

CONTENDERS = {
    "transformers bf16": ("source", "bfloat16", "int4"),
    "transformers fp32": ("source", "float32", "int4"),
    "ours bf16, INT4": ("export", "bfloat16", "int4"),
    "ours bf16, INT8 tokens": ("export", "bfloat16", "int8"),
    "ours fp32, INT8 tokens": ("export", "float32", "int8"),
}


def measure(folder: str, dtype: str, resident: str, prompt: int, new: int) -> dict[str, float]:
    """Load, prefill and decode once in this process."""
    from glm5_quant.model import load

    torch.set_num_threads(1)
    model = load(folder, dtype=getattr(torch, dtype), resident=resident)
    tokens = torch.randint(0, model.config.vocab_size, (1, prompt), generator=torch.Generator().manual_seed(0))
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with torch.inference_mode():
        model.generate(tokens[:, :8], max_new_tokens=2, **settings)
        model(tokens, use_cache=True)
        before = time.thread_time()
        model(tokens, use_cache=True)
        prefill = time.thread_time() - before
        before = time.thread_time()
        model.generate(tokens[:, :8], max_new_tokens=new, min_new_tokens=new, **settings)
        decode = time.thread_time() - before
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    return {"decode": new / decode, "prefill": prompt / prefill, "peak_mb": peak / 1024}


def main() -> None:
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("export")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        which, dtype, resident = CONTENDERS[options.one]
        print(json.dumps(measure(getattr(options, which), dtype, resident, options.prompt, options.new)))
        return
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    for _ in range(options.rounds):
        for name, found in runs.items():
            command = [sys.executable, __file__, *sys.argv[1:], "--one", name]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    print("| | decode, tokens/s | prefill, tokens/s | peak memory, MB |\n|---|---|---|---|")
    for name, found in runs.items():
        middle = {key: statistics.median(run[key] for run in found) for key in found[0]}
        print(f"| {name} | {middle['decode']:.1f} | {middle['prefill']:.0f} | {middle['peak_mb']:.0f} |")


if __name__ == "__main__":
    main()
