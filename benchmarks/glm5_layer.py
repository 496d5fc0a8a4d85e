"""One decoder layer of true GLM-5 size, with 8 and with 32 experts on disk: peak memory must not follow their number.

    python benchmarks/glm5_layer.py --work FOLDER [--tokens 4096] [--experts 8 32] [--preset default] [--out JSON]

Writes a `glm_moe_dsa` checkpoint of one layer (hidden 6,144, experts of 2,048, MLA attention and indexer of GLM-5's
sizes, random bfloat16 weights), calibrates it with `glm5-quant calibrate` in a process of its own, and reports peak
resident memory, seconds of one processor per expert, and what that means for 75 layers of 256 experts. Exit code 1
when the two peaks differ by more than 10% or one is above 4 GiB.
"""

import argparse
import json
import platform
import random
import resource
import shutil
import string
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import torch
from safetensors.torch import save_file

LIMIT_BYTES = 4 * 2**30
LAYERS, EXPERTS = 75, 256
HIDDEN, WIDTH, HEADS, Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 6144, 2048, 64, 2048, 512, 192, 64, 256
INDEX_HEADS, INDEX_DIM = 32, 128


def config(experts: int) -> dict:
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        "vocab_size": 256,
        "hidden_size": HIDDEN,
        "intermediate_size": 12288,
        "moe_intermediate_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": Q_RANK,
        "kv_lora_rank": KV_RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 0,
        "mlp_layer_types": ["sparse"],
        "indexer_types": ["full"],
        "index_topk": 2048,
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_DIM,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "bos_token_id": 245,
        "eos_token_id": 246,
        "pad_token_id": None,
        "num_nextn_predict_layers": 0,
    }


def attention_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_a_proj": (Q_RANK, HIDDEN),
        "self_attn.q_b_proj": (HEADS * (NOPE + ROPE), Q_RANK),
        "self_attn.kv_a_proj_with_mqa": (KV_RANK + ROPE, HIDDEN),
        "self_attn.kv_b_proj": (HEADS * (NOPE + VALUE), KV_RANK),
        "self_attn.o_proj": (HIDDEN, HEADS * VALUE),
        "self_attn.indexer.wq_b": (INDEX_HEADS * INDEX_DIM, Q_RANK),
        "self_attn.indexer.wk": (INDEX_DIM, HIDDEN),
        "self_attn.indexer.weights_proj": (INDEX_HEADS, HIDDEN),
    }
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def write_model(folder: Path, experts: int) -> None:
    """The checkpoint in shards of 8 experts, and a tokenizer whose ids are bytes."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
    from support_models import byte_tokenizer

    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.02).bfloat16()

    layer = "model.layers.0."
    ones = {
        "self_attn.q_a_layernorm": Q_RANK,
        "self_attn.kv_a_layernorm": KV_RANK,
        "self_attn.indexer.k_norm": INDEX_DIM,
    }
    ones |= {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN}
    first = {layer + name: drawn(*shape) for name, shape in attention_shapes().items()}
    first |= {f"{layer}{name}.weight": torch.ones(size).bfloat16() for name, size in ones.items()}
    first[f"{layer}self_attn.indexer.k_norm.bias"] = torch.zeros(INDEX_DIM).bfloat16()
    first |= {"model.embed_tokens.weight": drawn(256, HIDDEN) * 50, "lm_head.weight": drawn(256, HIDDEN)}
    first |= {"model.norm.weight": torch.ones(HIDDEN).bfloat16(), f"{layer}mlp.gate.weight": drawn(experts, HIDDEN)}
    first[f"{layer}mlp.gate.e_score_correction_bias"] = torch.zeros(experts)
    shapes = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
    first |= {f"{layer}mlp.shared_experts.{name}.weight": drawn(*shape) for name, shape in shapes.items()}
    weight_map, number = {}, 0

    def shard(tensors: dict[str, torch.Tensor]) -> None:
        nonlocal number
        number += 1
        save_file(tensors, folder / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, f"model-{number:05d}.safetensors"))

    shard(first)
    for start in range(0, experts, 8):
        shard({
            f"{layer}mlp.experts.{e}.{name}.weight": drawn(*shape)
            for e in range(start, min(start + 8, experts)) for name, shape in shapes.items()
        })  # fmt: skip
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config(experts)))
    byte_tokenizer(folder)


def measure(folder: Path, experts: int, tokens: int, preset: str) -> dict:
    """Calibrate in a process of its own; peak memory as the system counted it."""
    text = folder.parent / f"text-{experts}.txt"
    letters = string.ascii_letters + string.digits + string.punctuation + " "
    text.write_text("".join(random.Random(0).choices(letters, k=tokens + 600)))
    work = folder.parent / f"work-{experts}"
    shutil.rmtree(work, ignore_errors=True)
    common = [
        "--model", str(folder), "--num-samples", str(tokens // 512), "--seqlen", "512", "--max-memory", "4GiB",
        "--preset", preset, "--work-dir", str(work), "--json",
    ]  # fmt: skip
    planned = json.loads(subprocess.check_output(["glm5-quant", "plan", *common], text=True))
    started, used = time.perf_counter(), processor_seconds()
    report = json.loads(
        subprocess.check_output(["glm5-quant", "calibrate", *common, "--dataset", str(text)], text=True)
    )
    seconds, used = time.perf_counter() - started, processor_seconds() - used
    shutil.rmtree(work)
    return {
        "experts": experts,
        "seconds": seconds,
        "processor_seconds": used,
        "peak_bytes": report["peak_memory_bytes"],
        "planned_peak_bytes": planned["peak_memory_bytes"],
        "coverage": report["coverage"],
        "modules": report["modules"],
    }


def processor_seconds() -> float:
    """Of all processes that this one started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--experts", type=int, nargs=2, default=[8, 32])
    parser.add_argument("--preset", default="default")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folders = [args.work / f"glm5-layer-{experts}" for experts in args.experts]
    for folder, experts in zip(folders, args.experts, strict=True):
        if not folder.exists():
            write_model(folder, experts)

    runs = []
    for folder, experts in zip(folders, args.experts, strict=True):
        runs.append(measure(folder, experts, args.tokens, args.preset))
        print(json.dumps(runs[-1]), flush=True)
    few, many = runs
    per_expert = (many["processor_seconds"] - few["processor_seconds"]) / (many["experts"] - few["experts"])
    rest = few["processor_seconds"] - few["experts"] * per_expert
    result = {
        "date": date.today().isoformat(),
        "tokens": args.tokens,
        "preset": args.preset,
        "runs": runs,
        "peak_ratio": many["peak_bytes"] / few["peak_bytes"],
        "seconds_per_expert": per_expert,
        "seconds_per_layer_besides": rest,
        "projected_hours": LAYERS * (rest + EXPERTS * per_expert) / 3600,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "own_children_peak_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(abs(result["peak_ratio"] - 1) > 0.1 or max(r["peak_bytes"] for r in runs) > LIMIT_BYTES)


if __name__ == "__main__":
    sys.exit(main())
