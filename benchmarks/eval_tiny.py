"""Score glm5-tiny on held-out dialogues, then its plain round-to-nearest INT4 copy.

    OMP_NUM_THREADS=1 python benchmarks/eval_tiny.py --count 16 --turns 200

Prints exact answers by kind and distance for both, the share of tokens of the least and most used expert, and
KL(source || INT4) over all tokens. INT4 is asymmetric, blocks of 64, minimum to maximum, bfloat16 scales, on the
attention and expert matrices; embedding, norms, gates and mask predictors stay as they are.
"""

from __future__ import annotations

import argparse
import math
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from glm5_quant.model import tiny
from glm5_quant.model.glm5 import register
from glm5_quant.model.tiny.corpus import EVALUATION_SEED, dialogues
from glm5_quant.model.tiny.score import Score, encode, score
from glm5_quant.quant.grid import dequantize, minmax_grid, quantize


@torch.no_grad()
def round_to_nearest(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose attention and expert matrices went through INT4 and back."""
    copy = deepcopy(model)
    for name, p in copy.named_parameters():
        if "_proj" in name:
            grid = minmax_grid(p.float())
            p.copy_(dequantize(quantize(p.float(), grid), grid))
    return copy


@torch.no_grad()
def divergence(source: PreTrainedModel, other: PreTrainedModel, rows: list[Tensor]) -> tuple[float, float]:
    """Mean KL(source || other) in nats a token, and its standard error over dialogues."""
    means = []
    for ids in rows:
        log_p, log_q = (m(input_ids=ids, use_cache=False).logits.float().log_softmax(-1) for m in (source, other))
        means.append((log_p.exp() * (log_p - log_q)).sum(-1).mean().item())
    values = torch.tensor(means)
    return values.mean().item(), (values.std() / math.sqrt(len(means))).item()


def interval(right: int, asked: int) -> str:
    """Share with its 95% Wilson interval, in percent."""
    z, share = 1.96, right / asked
    centre = (share + z * z / (2 * asked)) / (1 + z * z / asked)
    half = z * math.sqrt(share * (1 - share) / asked + z * z / (4 * asked * asked)) / (1 + z * z / asked)
    return f"{100 * share:6.2f} [{100 * (centre - half):6.2f}, {100 * (centre + half):6.2f}]"


def table(source: Score, rounded: Score | None) -> str:
    lines = [f"{'answers':<18}{'asked':>6}  {'source, exact %':<26}{'round-to-nearest INT4':<26}"]
    for name, (right, asked) in source.exact.items():
        other = interval(*rounded.exact[name]) if rounded else ""
        lines.append(f"{name:<18}{asked:>6}  {interval(right, asked):<26}{other:<26}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=tiny.folder())
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--seed", type=int, default=EVALUATION_SEED)
    parser.add_argument("--language", choices=("en", "zh", "mixed"), default="mixed")
    parser.add_argument("--kl-count", type=int, default=6, help="dialogues on which the divergence is measured")
    parser.add_argument("--source-only", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    register()
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    rows = dialogues(args.seed, args.count, args.turns, args.language)
    source = score(model, tokenizer, rows)
    rounded_model = None if args.source_only else round_to_nearest(model)
    rounded = score(rounded_model, tokenizer, rows) if rounded_model else None
    print(f"{args.count} held-out dialogues of {args.turns} turns, seed {args.seed}, language {args.language}")
    print(table(source, rounded))
    for layer, share in enumerate(source.expert_share):
        print(f"layer {layer}: least used expert {share.min():.1%} of tokens, most used {share.max():.1%}")
    if rounded_model:
        ids = [torch.tensor([encode(tokenizer, row["messages"])]) for row in rows[: args.kl_count]]
        mean, error = divergence(model, rounded_model, ids)
        print(f"KL(source || INT4) {mean:.4f} +- {error:.4f} nats a token (standard error over dialogues)")


if __name__ == "__main__":
    main()
