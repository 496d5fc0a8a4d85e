"""Quantize a folder with GPTQModel (GPTQ), INT4 in groups, one thread.

    python benchmarks/peers/run_gptqmodel.py --model MODEL --tokens tokens.safetensors --out OUT --damp 0.05

Its strong setting is used: group-aware activation order (`act_group_aware`), which needs no index at run time. 0.05 is
its own damping. The result is in the GPTQ format, version 2 (zero-points as they are); score.py reads it by its rules.

GPTQModel imports torchvision, for pictures only, and torchvision's wheels want CUDA: where it is not installed, empty
modules stand in for it.
"""

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

from peer_common import Clock, calibration_tokens, one_thread, uneven_linears, versions, write_record


class NoPictures(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Empty modules in place of torchvision and what lies below it."""

    def find_spec(self, name, path=None, target=None):
        below = name.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if below else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: MagicMock()
        return module

    def exec_module(self, module):
        pass


if importlib.util.find_spec("torchvision") is None:
    # transformers looks for torchvision when it is first imported, and must not find the empty one.
    from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: F401

    sys.meta_path.append(NoPictures())

from gptqmodel import BACKEND, GPTQModel, QuantizeConfig  # noqa: E402
from gptqmodel.quantization import FORMAT  # noqa: E402


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
    # Its pool of workers asks for at least four cores, and stops with fewer.
    cores = max(4, os.cpu_count() or 1)
    os.cpu_count = lambda: cores
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
    model = GPTQModel.load(str(args.model), settings)
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
