"""Copy a trained run of train_tiny.py into the package as glm5-tiny.

python benchmarks/ship_tiny.py runs/tiny
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig

from glm5_quant.model import tiny
from glm5_quant.model.glm5.modeling import Glm5RefForCausalLM

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def ship(run: Path, folder: Path) -> None:
    """Write weights, config, generation config and tokenizer; the model card there is kept."""
    tokenizer = Tokenizer.from_file(str(run / "tokenizer.json"))
    ends = [tokenizer.token_to_id(name) for name in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    model = Glm5RefForCausalLM.from_pretrained(run, dtype=torch.bfloat16)
    model.config.eos_token_id = ends
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[0], do_sample=False)
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copyfile(run / name, folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--folder", type=Path, default=tiny.folder())
    args = parser.parse_args()
    ship(args.run, args.folder)


if __name__ == "__main__":
    main()
