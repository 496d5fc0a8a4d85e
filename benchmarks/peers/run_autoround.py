"""Quantize a folder with AutoRound (sign-gradient rounding), INT4 in groups, one thread.

    python benchmarks/peers/run_autoround.py --model MODEL --tokens tokens.safetensors --out OUT --iterations 60

The calibration windows of tokens.py are given as they are. An iteration uses `--batch` windows (2 in the figures of
docs/peers.md; AutoRound's own default is 8, four times the time). The result is written in compressed-tensors'
`pack-quantized` form, the one that llm-compressor and glm5-quant write.
"""

import argparse
import shutil
from pathlib import Path

import glm5_tiny
import torch
from auto_round import AutoRound
from peer_common import Clock, calibration_tokens, one_thread, uneven_linears, versions, write_record
from torch.utils.data import DataLoader
from transformers import AutoTokenizer


def uneven_layers(model: Path, args) -> dict[str, dict]:
    """Layers whose width the group size does not divide, with the group they get (peer_common.uneven_linears)."""
    uneven = uneven_linears(model, args.group_size)
    return {name: {"bits": 4, "group_size": size, "sym": args.symmetric} for name, size in uneven.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, required=True, help="file that tokens.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--batch", type=int, default=2, help="windows in one iteration")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--symmetric", action="store_true")
    parser.add_argument("--windows", type=int, help="use only the first of them (a trial run)")
    args = parser.parse_args()
    one_thread()
    tokens = calibration_tokens(args.tokens, args.windows)
    samples = [{"input_ids": window, "attention_mask": torch.ones_like(window)} for window in tokens]
    rounder = AutoRound(
        glm5_tiny.load(args.model) if glm5_tiny.is_glm5(args.model) else str(args.model),
        tokenizer=AutoTokenizer.from_pretrained(args.model),
        scheme="W4A16",
        bits=4,
        group_size=args.group_size,
        sym=args.symmetric,
        iters=args.iterations,
        batch_size=args.batch,
        seqlen=tokens.shape[1],
        nsamples=len(tokens),
        dataset=DataLoader(samples, batch_size=args.batch, shuffle=False),
        layer_config=uneven_layers(args.model, args),
        device_map="cpu",
        enable_torch_compile=False,
        low_gpu_mem_usage=False,
        low_cpu_mem_usage=False,  # True writes each block while it tunes the next one, and the clock would see that
        format="llm_compressor",
        ignore_layers=",".join(glm5_tiny.KEPT) if glm5_tiny.is_glm5(args.model) else "",
    )
    clock = Clock()
    with clock.running():
        rounder.quantize()
    rounder.save_quantized(str(args.out), format="llm_compressor", inplace=True)
    for path in args.model.glob("tokenizer*.json"):
        shutil.copy(path, args.out)
    settings = {name: value for name, value in vars(args).items() if not isinstance(value, Path)}
    write_record(
        args.out,
        clock,
        peer="AutoRound",
        settings={"model": args.model.name, "tokens": args.tokens.name, "out": args.out.name, **settings},
        calibration_windows=len(tokens),
        versions=versions("auto-round", "compressed-tensors"),
    )


if __name__ == "__main__":
    main()
