"""Train glm5-tiny from nothing on the synthetic dialogues, on one CPU core; deterministic by seed.

    OMP_NUM_THREADS=1 python benchmarks/train_tiny.py --output runs/tiny --phases 256x16x800,512x8x800,4096x2x300

A phase is LENGTHxBATCHxSTEPS, optionally @DSA to switch the sparse mask on. The state is written every --save-every
steps; the same command with --resume goes on from there, and the phases still ahead may be changed in between. The
learning rate is held until the last --decay-steps steps and then falls linearly to zero. Weights compute in bfloat16
with float32 masters.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from glm5_quant.model.glm5 import register
from glm5_quant.model.glm5.attention import Trace
from glm5_quant.model.glm5.configuration import Glm5RefConfig
from glm5_quant.model.glm5.modeling import Glm5RefForCausalLM
from glm5_quant.model.tiny import tokenizer as tiny_tokenizer
from glm5_quant.model.tiny.corpus import TRAINING_SEED, dialogue, dialogues
from glm5_quant.model.tiny.score import encode, score

HELD_OUT_SEED = 30_000_003
USER_TOKEN_SHARE = 0.1  # of the user's tokens are trained on; every answer token is
TOKENS_PER_TURN = 14  # a little under the mean, so that a dialogue always fills its window
MUON_LR, ADAM_LR, GATE_LR = 0.02, 3e-3, 1e-3


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Steps at one window length."""

    length: int
    batch: int
    steps: int
    sparse: bool


def parse_phases(text: str) -> list[Phase]:
    """ "256x16x800,4096x2x300@DSA" to phases."""
    phases = []
    for part in text.split(","):
        body, _, flag = part.partition("@")
        length, batch, steps = (int(number) for number in body.split("x"))
        phases.append(Phase(length=length, batch=batch, steps=steps, sparse=flag == "DSA"))
    return phases


TINY_SHAPE: Mapping[str, Any] = {
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 64,
    "gqa_group_size": [4, 2, 1],
}


def tiny_config(vocab_size: int, shape: Mapping[str, Any]) -> Glm5RefConfig:
    """The shape of glm5-tiny: every matrix width a multiple of 64."""
    return Glm5RefConfig(vocab_size=-(-vocab_size // 64) * 64, dtype="bfloat16", **shape)


def assistant_mask(ids_BT: Tensor, user: int, assistant: int) -> Tensor:
    """True where a token belongs to an answer, the <|user|> that ends it included."""
    position_T = torch.arange(ids_BT.shape[1])
    last_user = torch.where(ids_BT == user, position_T, -1).cummax(dim=1).values
    last_assistant = torch.where(ids_BT == assistant, position_T, -1).cummax(dim=1).values
    inside = (last_assistant > last_user) & (ids_BT != assistant)
    ends = (ids_BT == user) & (last_assistant >= 0)
    return inside | ends


class Data:
    """Windows of training dialogues; the n-th window of a run is always the same."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self.tokenizer, self.next_seed = tokenizer, TRAINING_SEED + seed * 4_000_000
        self.user, self.assistant = tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>"])

    def batch(self, phase: Phase) -> tuple[Tensor, Tensor, Tensor]:
        """ids [B, L]; which of them to predict [B, L]; which belong to an answer [B, L]."""
        rows = []
        for _ in range(phase.batch):
            made = dialogue(self.next_seed, phase.length // TOKENS_PER_TURN)
            self.next_seed += 1
            rows.append(encode(self.tokenizer, made["messages"])[: phase.length])
        shortest = min(len(row) for row in rows)
        ids = torch.tensor([row[:shortest] for row in rows])
        answer = assistant_mask(ids, self.user, self.assistant)
        return ids, answer | (torch.rand(ids.shape) < USER_TOKEN_SHARE), answer


class Optimizer:
    """Muon for the hidden matrices, Adam for the rest, on float32 masters of bfloat16 weights.

    Muon (Jordan et al. 2024) replaces a matrix's momentum by its nearest orthogonal matrix, by Newton-Schulz steps.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.state: dict[str, dict[str, Tensor]] = {}
        self.step_count = 0
        for name, p in self.params.items():
            self.state[name] = {"master": p.detach().float().clone(), "m": torch.zeros_like(p, dtype=torch.float32)}
            if not is_muon(name):
                self.state[name]["v"] = torch.zeros_like(p, dtype=torch.float32)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        self.step_count += 1
        for name, p in self.params.items():
            if p.grad is None:
                continue
            state, grad = self.state[name], p.grad.float()
            if is_muon(name):
                state["m"].mul_(0.95).add_(grad)
                update = orthogonalize(grad + 0.95 * state["m"])
                lr = MUON_LR * scale * max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
                state["master"].mul_(1 - 0.1 * lr).sub_(update.float(), alpha=lr)
            else:
                self.adam(state, grad, (GATE_LR if ".gate." in name else ADAM_LR) * scale)
            p.copy_(state["master"])
            p.grad = None

    def adam(self, state: dict[str, Tensor], grad: Tensor, lr: float) -> None:
        state["m"].lerp_(grad, 0.1)
        state["v"].lerp_(grad.square(), 0.02)
        m_hat = state["m"] / (1 - 0.9**self.step_count)
        v_hat = state["v"] / (1 - 0.98**self.step_count)
        state["master"].sub_(m_hat / (v_hat.sqrt() + 1e-8), alpha=lr)


def is_muon(name: str) -> bool:
    return "mask_predictor" not in name and any(key in name for key in ("_proj",))


def orthogonalize(update: Tensor, steps: int = 5) -> Tensor:
    """Nearest (semi-)orthogonal matrix of each matrix in the stack: quintic Newton-Schulz steps in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).bfloat16()
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def loss_of(
    model: Glm5RefForCausalLM, batch: tuple[Tensor, Tensor, Tensor], align_rows: int
) -> tuple[Tensor, dict[str, float]]:
    """Cross-entropy on the chosen tokens plus routing losses plus the mask predictor's own loss."""
    ids, chosen, answer = batch
    trace = Trace(align_rows=align_rows)
    hidden = model.model(input_ids=ids[:, :-1], trace=trace, use_cache=False).last_hidden_state
    chosen = chosen[:, 1:]
    token_loss = F.cross_entropy(model.lm_head(hidden[chosen]).float(), ids[:, 1:][chosen], reduction="none")
    loss = token_loss.mean()
    total = loss + model.routing_loss(trace)
    parts = {"loss": loss.item(), "answer_loss": token_loss[answer[:, 1:][chosen]].mean().item()}
    if trace.alignment:
        alignment = torch.stack(trace.alignment).mean()
        total = total + alignment
        parts["alignment"] = alignment.item()
    return total, parts


def set_sparse(model: Glm5RefForCausalLM, on: bool) -> None:
    for layer in model.model.layers:
        layer.self_attn.sparse_ratio = model.config.dsa_sparse_ratio if on else 0.0


def lr_scale(step: int, total: int, decay: int) -> float:
    """Warm-up over 50 steps, level, then linear to zero over the last `decay` steps."""
    return min(1.0, (step + 1) / 50, (total - step) / max(1, decay))


class Run:
    """One training run: model, optimizer, data and the step reached."""

    def __init__(self, output: Path, seed: int, shape: Mapping[str, Any] | None = None) -> None:
        self.output = output
        output.mkdir(parents=True, exist_ok=True)
        if not (output / "tokenizer.json").exists():
            tiny_tokenizer.save(output, tiny_tokenizer.train())
        register()
        self.tokenizer = AutoTokenizer.from_pretrained(output)
        torch.manual_seed(seed)
        self.model = Glm5RefForCausalLM(tiny_config(len(self.tokenizer), shape or TINY_SHAPE))
        self.optimizer = Optimizer(self.model)  # masters keep the float32 start
        self.model.bfloat16().train()
        self.data = Data(self.tokenizer, seed)
        self.step, self.tokens, self.seconds = 0, 0, 0.0

    def save(self) -> None:
        state = {
            "optimizer": self.optimizer.state,
            "counters": (self.optimizer.step_count, self.data.next_seed, self.step, self.tokens, self.seconds),
            "rng": torch.get_rng_state(),
        }
        torch.save(state, self.output / "state.tmp")
        (self.output / "state.tmp").rename(self.output / "state.pt")
        self.model.save_pretrained(self.output)

    def load(self) -> None:
        state = torch.load(self.output / "state.pt", weights_only=True)
        self.optimizer.state = state["optimizer"]
        counters = state["counters"]
        self.optimizer.step_count, self.data.next_seed, self.step, self.tokens, self.seconds = counters
        torch.set_rng_state(state["rng"])
        for name, p in self.model.named_parameters():
            p.data.copy_(self.optimizer.state[name]["master"])

    def one_step(self, phase: Phase, scale: float) -> dict[str, float]:
        start = time.perf_counter()
        batch = self.data.batch(phase)
        set_sparse(self.model, phase.sparse)
        total, parts = loss_of(self.model, batch, align_rows=8 if phase.length >= 512 else 0)
        total.backward()
        self.optimizer.step(scale)
        self.step += 1
        self.tokens += batch[0].numel()
        self.seconds += time.perf_counter() - start
        return parts


def evaluate(run: Run, count: int, turns: int) -> dict[str, float]:
    """Held-out shares of exact answers and the least and most used expert."""
    run.model.eval()
    set_sparse(run.model, True)
    result = score(run.model, run.tokenizer, dialogues(HELD_OUT_SEED, count, turns))
    run.model.train()
    shares = {f"{name} @{turns}": result.share(name) for name in result.exact}
    expert = result.expert_share
    return {**shares, "expert_min": expert.min().item(), "expert_max": expert.max().item()}


def train(run: Run, phases: list[Phase], args: argparse.Namespace) -> None:
    """Run the steps that are left, with a log line every 20 and a held-out score every --eval-every."""
    total = sum(phase.steps for phase in phases)
    last = min(total, args.until or total)
    per_step = [phase for phase in phases for _ in range(phase.steps)]
    rows: list[dict[str, float]] = []
    while run.step < last:
        phase = per_step[run.step]
        rows.append(run.one_step(phase, lr_scale(run.step, total, args.decay_steps)))
        if run.step % args.log_every == 0:
            mean = {key: sum(r.get(key, 0.0) for r in rows) / len(rows) for key in rows[-1]}
            rows = []
            log(run, {"length": phase.length, **mean})
        if run.step % args.eval_every == 0:
            turns = max(10, phase.length // 17)
            log(run, evaluate(run, max(2, 400 // turns), turns))
        if run.step % args.save_every == 0 or run.step == last:
            run.save()


def log(run: Run, values: dict[str, float]) -> None:
    """One JSON line in log.jsonl and on the terminal."""
    line = {"step": run.step, "tokens": run.tokens, "seconds": round(run.seconds, 1)}
    text = json.dumps(line | {key: round(value, 4) for key, value in values.items()})
    print(text, flush=True)
    with (run.output / "log.jsonl").open("a", encoding="utf-8") as file:
        file.write(text + "\n")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", type=Path, required=True)
    made.add_argument("--phases", required=True)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--decay-steps", type=int, default=300)
    made.add_argument("--log-every", type=int, default=20)
    made.add_argument("--eval-every", type=int, default=100)
    made.add_argument("--save-every", type=int, default=50)
    made.add_argument("--until", type=int, help="stop at this step, to go on later with --resume")
    made.add_argument("--resume", action="store_true")
    return made


def main() -> None:
    args = parser().parse_args()
    torch.set_num_threads(1)
    run = Run(args.output, args.seed)
    if args.resume:
        run.load()
    train(run, parse_phases(args.phases), args)


if __name__ == "__main__":
    main()
