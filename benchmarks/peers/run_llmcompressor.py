"""Quantize a folder with llm-compressor: round-to-nearest, GPTQ or AWQ, INT4 in groups, one thread.

    python benchmarks/peers/run_llmcompressor.py --model MODEL --tokens TOKENS --out OUT --method gptq --damp 0.1

Its strong settings are used: GPTQ in static activation order; AWQ searches scales with and without the weights' share
(`duo_scaling="both"`), and its mapping is written out layer by layer, because the one that ships for GLM expects a
router in every layer and layer 0 is dense; experts become one Linear each (its own modules) and, unless
`--routed-only`, every expert sees every token (`moe_calibrate_all_experts`).
"""

import argparse
from pathlib import Path

import glm5_tiny
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor import oneshot
from llmcompressor.modeling.moe.linearize import linearize_moe
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.awq.mappings import AWQMapping
from llmcompressor.pipelines.cache import IntermediatesCache
from peer_common import Clock, calibration_tokens, group_for, one_thread, versions, write_record
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer


def load(folder: Path, *, all_experts: bool):
    """The source model in its own dtype; experts as one Linear each where there are any.

    `linearize_moe` gives the modules that its `load_quantizable_moe` gives, without needing torchvision.
    """
    if glm5_tiny.is_glm5(folder):
        return glm5_tiny.load(folder, all_experts=all_experts)
    return linearize_moe(AutoModelForCausalLM.from_pretrained(folder, dtype="auto"))


def schemes(model, args) -> dict[str, QuantizationScheme]:
    """One scheme for each group size that the model's widths allow."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith("_proj"):
            names.setdefault(group_for(module.in_features, args.group_size), []).append(name)
    weights = {"num_bits": 4, "type": "int", "symmetric": args.symmetric, "strategy": "group"}
    weights["observer"] = args.observer
    if len(names) == 1:
        names = {size: ["Linear"] for size in names}
    return {
        f"group_{size}": QuantizationScheme(targets=targets, weights=QuantizationArgs(group_size=size, **weights))
        for size, targets in names.items()
    }


def awq_mappings(model) -> list[AWQMapping]:
    """Llama's mappings layer by layer; where a layer has experts, router, experts and shared expert share the norm.

    glm5-tiny's gates normalize their input again, channel by channel, so its experts cannot be smoothed with the norm;
    its mask predictors read what the attention reads.
    """
    mappings = []
    for index, layer in enumerate(model.model.layers):
        at = rf"re:^model\.layers\.{index}\."
        glm5 = hasattr(layer.self_attn, "mask_predictor")
        attention = [rf"{at}self_attn\.{p}_proj$" for p in "qkv"]
        attention += [rf"{at}self_attn\.mask_predictor\.[qk]$"] if glm5 else []
        mappings.append(AWQMapping(f"{at}input_layernorm$", attention))
        mappings.append(AWQMapping(rf"{at}self_attn\.v_proj$", [rf"{at}self_attn\.o_proj$"]))
        readers = [rf"{at}mlp\.gate_proj$", rf"{at}mlp\.up_proj$"]
        blocks = [rf"{at}mlp\."]
        if hasattr(layer.mlp, "experts"):
            count = len(layer.mlp.experts) if glm5 else layer.mlp.experts.num_experts
            blocks = [] if glm5 else [rf"{at}mlp\.shared_experts\."]
            blocks += [rf"{at}mlp\.experts\.{expert}\." for expert in range(count)]
            readers = [rf"{at}mlp\.gate$"] + [rf"{block}{p}_proj$" for block in blocks for p in ("gate", "up")]
        if not glm5:
            mappings.append(AWQMapping(f"{at}post_attention_layernorm$", readers))
        mappings += [AWQMapping(f"{block}up_proj$", [f"{block}down_proj$"]) for block in blocks]
    return mappings


def recipe(model, args) -> list:
    kept = ["lm_head", *(f"re:.*{part}.*" for part in glm5_tiny.KEPT)]
    common = {"config_groups": schemes(model, args), "ignore": kept}
    if args.method == "rtn":
        return [QuantizationModifier(**common)]
    if args.method == "gptq":
        return [GPTQModifier(dampening_frac=args.damp, actorder="static", **common)]
    return [
        AWQModifier(mappings=awq_mappings(model), duo_scaling="both", n_grid=args.awq_grid),
        QuantizationModifier(**common),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, required=True, help="file that tokens.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--method", choices=["rtn", "gptq", "awq"], required=True)
    parser.add_argument("--damp", type=float, default=0.01, help="GPTQ: share of the mean diagonal")
    parser.add_argument("--awq-grid", type=int, default=20)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--symmetric", action="store_true")
    parser.add_argument("--observer", default="memoryless_minmax", help="how a group's range is found")
    parser.add_argument("--routed-only", action="store_true", help="an expert sees only tokens routed to it")
    parser.add_argument("--windows", type=int, help="use only the first of them (a trial run)")
    args = parser.parse_args()
    one_thread()
    if not torch.accelerator.is_available():
        # AWQ in 0.14 pins its cache before each search, which torch refuses on a machine without an accelerator.
        IntermediatesCache.pin_memory = lambda cache, index: None
    model = load(args.model, all_experts=not args.routed_only and args.method != "rtn")
    tokens = calibration_tokens(args.tokens, args.windows)
    samples = [{"input_ids": window, "attention_mask": torch.ones_like(window)} for window in tokens]
    options = {"pipeline": "datafree"}
    if args.method != "rtn":
        options = {
            "dataset": DataLoader(samples, batch_size=1, shuffle=False),
            "num_calibration_samples": len(samples),
            "max_seq_length": tokens.shape[1],
            "moe_calibrate_all_experts": not args.routed_only,
        }
    clock = Clock()
    with clock.running():
        oneshot(model=model, recipe=recipe(model, args), **options)
    model.save_pretrained(args.out, save_compressed=True)
    AutoTokenizer.from_pretrained(args.model).save_pretrained(args.out)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    for name in ("model", "tokens", "out"):
        settings[name] = Path(settings[name]).name
    write_record(
        args.out,
        clock,
        peer="llm-compressor",
        settings=settings,
        calibration_windows=len(tokens),
        versions=versions("llmcompressor", "compressed-tensors"),
    )


if __name__ == "__main__":
    main()
