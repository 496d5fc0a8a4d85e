"""Quantize a folder with GPTQModel (GPTQ), INT4 in groups, one thread.

    python benchmarks/peers/run_gptqmodel.py --model MODEL --tokens tokens.safetensors --out OUT --damp 0.05

Its strong setting is used: group-aware activation order (`act_group_aware`), which needs no index at run time. 0.05 is
its own damping. The result is in the GPTQ format, version 2 (zero-points as they are); score.py reads it by its rules.
"""

import argparse
import re
from pathlib import Path

from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.quantization import FORMAT
from peer_common import Clock, calibration_tokens, one_thread, uneven_linears, versions, write_record


def uneven_layers(model: Path, group_size: int) -> dict[str, dict]:
    """Per-layer overrides for widths that the group size does not divide (peer_common.uneven_linears)."""
    uneven = uneven_linears(model, group_size)
    return {f"+:^{re.escape(name)}$": {"group_size": size} for name, size in uneven.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, required=True, help="file that tokens.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--damp", type=float, default=0.05)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--symmetric", action="store_true")
    parser.add_argument("--windows", type=int, help="use only the first of them (a trial run)")
    args = parser.parse_args()
    one_thread()
    tokens = calibration_tokens(args.tokens, args.windows)
    settings = QuantizeConfig(
        bits=4,
        group_size=args.group_size,
        sym=args.symmetric,
        desc_act=False,
        act_group_aware=True,
        damp_percent=args.damp,
        format=FORMAT.GPTQ_V2,
        dynamic=uneven_layers(args.model, args.group_size) or None,
        device="cpu",
        offload_to_disk=False,
    )
    model = GPTQModel.load(str(args.model), settings, device="cpu")
    samples = [{"input_ids": window.tolist(), "attention_mask": [1] * len(window)} for window in tokens]
    clock = Clock()
    with clock.running():
        model.quantize(samples, batch_size=1, calibration_sort=None, backend=BACKEND.TORCH)
    model.save(str(args.out))
    plain = {name: value for name, value in vars(args).items() if not isinstance(value, Path)}
    write_record(
        args.out,
        clock,
        peer="GPTQModel",
        settings={"model": args.model.name, "tokens": args.tokens.name, "out": args.out.name, **plain},
        calibration_windows=len(tokens),
        versions=versions("gptqmodel"),
    )


if __name__ == "__main__":
    main()
