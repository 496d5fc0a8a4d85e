"""Copy a trained run of train_tiny.py into the package as glm5-tiny.

python benchmarks/ship_tiny.py runs/tiny
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import GenerationConfig

from glm5_quant.model import tiny
from glm5_quant.model.glm5.modeling import DecoderLayer, Glm5RefForCausalLM

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SPREAD_CHANNELS = 6  # of every 64
SPREAD = (16.0, 32.0)


def factors(channels: int, generator: torch.Generator) -> Tensor:
    """[channels]: 1, but 2^4 or 2^5 at SPREAD_CHANNELS random places of every 64."""
    made = torch.ones(channels)
    for start in range(0, channels, 64):
        places = start + torch.randperm(64, generator=generator)[:SPREAD_CHANNELS]
        made[places] = torch.tensor(SPREAD)[torch.randint(len(SPREAD), (SPREAD_CHANNELS,), generator=generator)]
    return made


@torch.no_grad()
def spread_channels(model: Glm5RefForCausalLM, seed: int = 0) -> None:
    """Give inputs of q/k/v, o and down projections outlier channels, in place, without changing the function."""
    generator = torch.Generator().manual_seed(seed)
    for layer in model.model.layers:
        spread_attention(layer, generator)
        experts = layer.mlp.experts
        half = experts.down_proj.shape[-1]
        for expert in range(experts.num_experts):
            scale = factors(half, generator)
            experts.gate_up_proj[expert, half:] *= scale[:, None]
            experts.down_proj[expert] /= scale


def spread_attention(layer: DecoderLayer, generator: torch.Generator) -> None:
    """Norm gain against the columns of all that read it; value rows against output columns."""
    attention = layer.self_attn
    scale = factors(layer.input_layernorm.weight.numel(), generator)
    layer.input_layernorm.weight *= scale
    predictor = attention.mask_predictor
    for reader in (attention.q_proj, attention.k_proj, attention.v_proj, predictor.q, predictor.k):
        reader.weight /= scale
    scale = factors(attention.v_proj.out_features, generator)
    attention.v_proj.weight *= scale[:, None]
    shared_by = attention.q_proj.out_features // attention.v_proj.out_features
    per_head = scale.view(-1, attention.head_dim).repeat_interleave(shared_by, dim=0)
    attention.o_proj.weight /= per_head.flatten()


def ship(run: Path, folder: Path, *, spread: bool = True) -> None:
    """Write weights, config, generation config and tokenizer; the model card there is kept."""
    tokenizer = Tokenizer.from_file(str(run / "tokenizer.json"))
    ends = [tokenizer.token_to_id(name) for name in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    model = Glm5RefForCausalLM.from_pretrained(run, dtype=torch.bfloat16)
    model.config.eos_token_id = ends
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[0], do_sample=False)
    if spread:
        spread_channels(model)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    for name in TOKENIZER_FILES:
        shutil.copyfile(run / name, folder / name)


def write_curve(log_file: Path, csv_file: Path) -> None:
    """Reduce log.jsonl to a small CSV of the training loss."""
    keys = ["step", "tokens", "seconds", "length", "loss", "answer_loss", "alignment"]
    lines = [json.loads(line) for line in log_file.read_text(encoding="utf-8").splitlines()]
    with csv_file.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, keys, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(line for line in lines if "loss" in line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--folder", type=Path, default=tiny.folder())
    parser.add_argument("--plain", action="store_true", help="do not put outlier channels in")
    parser.add_argument("--curve", type=Path, help="also write the training curve to this CSV file")
    args = parser.parse_args()
    ship(args.run, args.folder, spread=not args.plain)
    if args.curve:
        write_curve(args.run / "log.jsonl", args.curve)


if __name__ == "__main__":
    main()
