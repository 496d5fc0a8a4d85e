"""The four figures of this project's claims on one model, each with its interval.

    OMP_NUM_THREADS=1 python benchmarks/claims.py runs/claims-tiny --dialogues 16
    OMP_NUM_THREADS=1 python benchmarks/claims.py runs/claims --model FOLDER --dataset TEXT.jsonl --talk DIALOGUES.jsonl

Four exports are calibrated on the same text (one that OUT/NAME/export already holds is taken as it is):

    plain        round to nearest, no ingredient of ours
    unprotected  all ingredients, but numeric tokens weigh no more than others (numeric_weight = 0)
    bare         `eampq` without its compensation vectors
    eampq        the default preset
    kept         (with --keep-compensation) the default preset, but with every compensation vector that helps held-out
                 tokens at all, not only those worth 1% of the error; and kept-bare, the same without them

Measured: growth of perplexity over the turns of teacher-forced dialogues, errors on numeric tokens there, bytes of the
shadows, and time of `eampq` against the same codes without shadows and compensation. Intervals are 95% bootstraps over
dialogues, all models on the same draws; those of time are over turns in which the contenders took their place by turns.
Written: OUT/claims.json, and a Markdown table on stdout. `--result FILE` takes the JSON of an `eval` run on the same
exports.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from glm5_quant.calibrate import Settings, calibrate, compensation
from glm5_quant.eval import evaluate
from glm5_quant.eval.report_json import to_dict
from glm5_quant.eval.statistics import Estimate, Resampled, Statistic
from glm5_quant.eval.tally import COLUMN
from glm5_quant.model import export, load, tiny
from glm5_quant.model.atomic import write_bytes
from glm5_quant.model.sidecar import FOLDER, JSON_NAME, KINDS
from glm5_quant.model.tiny.corpus import EVALUATION_SEED, calibration_dialogues, dialogues, export_jsonl
from glm5_quant.quant.config import PRESETS, QuantConfig

PLAIN = QuantConfig(
    error_feedback=False, probed_tokens=0, weighted_grid=False, shrink=False, alphas=(), descent_sweeps=0,
    shadow_budget=0.0, compensation=False, numeric_weight=0.0,
)  # fmt: skip
CALIBRATED = {
    "plain": PLAIN,
    "unprotected": replace(PRESETS["default"], numeric_weight=0.0),
    "eampq": PRESETS["default"],
}
COMPARED = ("plain", "unprotected", "bare", "eampq", "kept-bare", "kept")
PAIRS = (("eampq", "bare"), ("kept", "kept-bare"), ("eampq", "unprotected"), ("eampq", "plain"), ("bare", "plain"))
PARTS = ("first", "last", "whole", "numeric")
Floats = NDArray[np.float64]


def make_exports(
    out: Path, model: Path, dataset: Path, settings: Settings, *, keep_compensation: bool = False
) -> dict[str, Path]:
    """Calibrate and export what is not there yet, and take compensation and shadows away from copies of `eampq`."""
    found = {}
    wanted = CALIBRATED | ({"kept": PRESETS["default"]} if keep_compensation else {})
    for name, quant in wanted.items():
        found[name] = out / name / "export"
        if not found[name].exists():
            worth = compensation.WORTH_KEEPING
            compensation.WORTH_KEEPING = 1.0 if name == "kept" else worth
            calibrate(model, dataset, work_dir=out / name, settings=replace(settings, quant=quant))
            compensation.WORTH_KEEPING = worth
            export(model, out / name / "calibration", found[name])
    if keep_compensation:
        found["kept-bare"] = without(found["kept"], out / "kept-bare" / "export", {"compensation"})
    found["bare"] = without(found["eampq"], out / "bare" / "export", {"compensation"})
    found["base"] = without(found["eampq"], out / "base" / "export", {"compensation", "shadows"})
    return found


def without(folder: Path, output: Path, features: Collection[str]) -> Path:
    """A copy of an export whose sidecar lacks some features; the codes are the same file."""
    if output.exists():
        shutil.rmtree(output)
    shutil.copytree(folder, output, copy_function=_link)
    record = json.loads((folder / JSON_NAME).read_text())
    dropped = {name for name in record["tensors"] if KINDS.get(name.rsplit(".", 1)[-1]) in features}
    record["features"] = [name for name in record["features"] if name not in features]
    record["tensors"] = {name: found for name, found in record["tensors"].items() if name not in dropped}
    for path in sorted((output / FOLDER).glob("*.safetensors")):
        kept = {name: tensor for name, tensor in load_file(path).items() if name not in dropped}
        path.unlink()
        if kept:
            save_file(kept, path)
    (output / JSON_NAME).unlink()
    write_bytes(output / JSON_NAME, json.dumps(record).encode())
    return output


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def read_sums(result: Mapping[str, Any], names: Sequence[str]) -> Floats:
    """[D, M, 4, F] of `DialogueSums` (first and last tenth, whole, numeric) of the named exports of a result's JSON."""
    exports = {found["name"].split("/")[0]: found["dialogue"] for found in result["exports"]}
    parts = [[exports[name]["sums"][part] for part in PARTS] for name in names]
    return np.asarray(parts, dtype=np.float64).transpose(2, 0, 1, 3)


def growth(column: str) -> Statistic:
    """Statistic of one model's [D, 4, F]: perplexity in the last tenth of the turns over that in the first, minus 1."""

    def found(totals: Floats) -> Floats:
        first, last = (totals[:, part, COLUMN[column]] / totals[:, part, COLUMN["tokens"]] for part in (0, 1))
        return np.asarray(np.exp(last - first) - 1.0)

    return found


def beyond(totals: Floats) -> Floats:
    """Statistic: the same of perplexity / source."""
    return np.asarray((growth("nll")(totals) + 1.0) / (growth("nll_source")(totals) + 1.0) - 1.0)


def share(column: str, part: str) -> Statistic:
    """Statistic: mean of a column over the tokens of a part."""
    place = PARTS.index(part)
    return lambda totals: np.asarray(totals[:, place, COLUMN[column]] / totals[:, place, COLUMN["tokens"]])


FIGURES: Mapping[str, Statistic] = {
    "growth": growth("nll"),
    "growth beyond source": beyond,
    "KL": share("kl", "whole"),
    "numeric KL": share("kl", "numeric"),
    "numeric top-1 differs": share("flips", "numeric"),
    "numeric right only in source": share("lost", "numeric"),
}


def of_model(index: int, statistic: Statistic) -> Statistic:
    """A statistic of one model's part of the [D, M, 4, F] totals."""
    return lambda totals: statistic(totals[:, index])


def against(index: int, other: int, statistic: Statistic, relative: bool) -> Statistic:
    """Change of a figure from model `other` to model `index`: the difference, or as a share (-0.76: 76% less)."""

    def found(totals: Floats) -> Floats:
        one, two = statistic(totals[:, index]), statistic(totals[:, other])
        return np.asarray(one / two - 1.0 if relative else one - two)

    return found


def drift_figures(
    sums: Floats, names: Sequence[str], draws: int = 2000, seed: int = 0
) -> dict[str, dict[str, Estimate]]:
    """Every figure of every model, and the comparisons that the claims make, all on the same draws of dialogues."""
    drawn, at = Resampled(sums, draws, seed), {name: index for index, name in enumerate(names)}
    found = {
        "source": {
            "growth": drawn.estimate(of_model(0, growth("nll_source"))),
            "numeric top-1 right": drawn.estimate(of_model(0, share("right_source", "numeric"))),
        }
    }
    for name, index in at.items():
        found[name] = {figure: drawn.estimate(of_model(index, statistic)) for figure, statistic in FIGURES.items()}
    for one, other in PAIRS:
        if one in at and other in at:
            found[f"{one} against {other}"] = {
                f"{figure}, " + ("difference" if "growth" in figure else "change"): drawn.estimate(
                    against(at[one], at[other], statistic, relative="growth" not in figure)
                )
                for figure, statistic in FIGURES.items()
            }
    return found


def memory(folder: Path) -> dict[str, Any]:
    """Bytes of shadows and compensation, as shares of the 16-bit and the INT4 bytes of the quantized matrices."""
    record = json.loads((folder / JSON_NAME).read_text())
    sizes = dict.fromkeys(("shadows", "compensation"), 0)
    for path in (folder / FOLDER).glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            kind = KINDS.get(name.rsplit(".", 1)[-1])
            if kind in sizes:
                sizes[kind] += tensor.nbytes
    halves = sum(2 * module["n"] * module["k"] for module in record["modules"].values())
    packed = load(folder).glm5_quant.packed_bytes
    columns = sum(name.endswith(".shadow_index") for name in record["tensors"])
    return {f"{kind}_bytes": size for kind, size in sizes.items()} | {
        "matrices": len(record["modules"]),
        "matrices_with_shadows": columns,
        "compensated_layers": sum(name.endswith(".compensation") for name in record["tensors"]),
        "shadows_of_fp16": sizes["shadows"] / halves,
        "shadows_of_int4": sizes["shadows"] / packed,
        "compensation_of_int4": sizes["compensation"] / packed,
    }


def added_time(whole: Path, base: Path, rounds: int, prompt: int) -> dict[str, Any]:
    """Time that shadows and compensation add to reading `prompt` tokens, and to 8 single tokens after them.

    CPU time of this one thread, both models in turn; the interval is a bootstrap over rounds of the ratio of sums.
    """
    models = {name: load(folder) for name, folder in (("whole", whole), ("base", base))}
    ids = torch.arange(prompt)[None] % models["base"].config.vocab_size
    spent = np.zeros((rounds, 2, 2))
    for turn in range(rounds + 1):
        for place, model in enumerate(models.values()):
            times = _read_and_go_on(model, ids, 8)
            if turn:
                spent[turn - 1, place] = times

    def added(column: int) -> Estimate:
        ratio: Callable[[Floats], Floats] = lambda t: np.asarray(t[:, 0, column] / t[:, 1, column] - 1.0)  # noqa: E731
        return Resampled(spent, 2000, 0).estimate(ratio)

    return {
        "dtype": str(models["base"].dtype).removeprefix("torch."),
        "rounds": rounds,
        "prompt_tokens": prompt,
        "base_prefill_seconds": float(np.median(spent[:, 1, 0])),
        "base_decode_seconds": float(np.median(spent[:, 1, 1])) / 8,
        "prefill, added": added(0),
        "decode, added": added(1),
    }


@torch.inference_mode()
def _read_and_go_on(model: Any, ids: torch.Tensor, steps: int) -> tuple[float, float]:
    start = time.process_time()
    output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    middle = time.process_time()
    for _ in range(steps):
        cache = output.get("cache", output.get("past_key_values"))
        name = "cache" if "cache" in output else "past_key_values"
        token = output.logits[:, -1:].argmax(-1)
        output = model(input_ids=token, use_cache=True, **{name: cache})
    return middle - start, time.process_time() - middle


def plain(value: Any) -> Any:
    """Estimates as [value, low, high], for JSON."""
    if isinstance(value, Estimate):
        return list(asdict(value).values())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def markdown(figures: Mapping[str, Any]) -> str:
    """One row a figure: value with its interval."""
    lines = ["| what | figure | value | 95% interval |", "|---|---|---:|---:|"]
    for what, group in figures.items():
        for name, value in group.items():
            if isinstance(value, Estimate) and value.value is not None:
                ends = "" if value.low is None else f"{value.low:.4g} to {value.high:.4g}"
                lines.append(f"| {what} | {name.replace('_', ' ')} | {value.value:.4g} | {ends} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, default=tiny.folder())
    parser.add_argument("--dataset", type=Path, help="calibration text; glm5-tiny's own where none is given")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--keep-compensation", action="store_true", help="also calibrate `kept`")
    parser.add_argument("--talk", type=Path, help="dialogues; glm5-tiny's held-out ones where none are given")
    parser.add_argument("--language", choices=("en", "zh", "mixed"), default="mixed", help="of glm5-tiny's own")
    parser.add_argument("--dialogues", type=int, default=16)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=30, help="of the timing; 0 leaves it out")
    parser.add_argument("--result", type=Path, help="`eval --json` of these exports, instead of measuring them here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    settings, dataset = Settings(num_samples=args.samples, seqlen=args.seqlen), args.dataset or own_text(args.out)
    folders = make_exports(args.out, args.model, dataset, settings, keep_compensation=args.keep_compensation)
    result = json.loads(args.result.read_text()) if args.result else measure(args, folders)
    names = [name for name in COMPARED if any(found["name"].split("/")[0] == name for found in result["exports"])]
    figures: dict[str, Any] = dict(drift_figures(read_sums(result, names), names))
    figures["memory"] = {name: memory(folders[name]) for name in ("eampq", "kept") if name in folders}
    if args.rounds:
        figures["time"] = added_time(folders["eampq"], folders["base"], args.rounds, 512)
    dialogue = result["exports"][0]["dialogue"]
    about = {
        "model": args.model.name,
        "calibration": f"{args.samples} windows of {args.seqlen}",
        "dialogues": f"{dialogue['dialogues']} of {dialogue['turns']} turns",
        "answer tokens": result["settings"]["scored_tokens"],
        "numeric tokens": result["settings"]["scored_numeric"],
        "longest context": result["settings"]["longest_position"],
        "dtype": result["settings"]["dtype"],
        "languages": sorted({found["name"] for found in dialogue["slices"] if found["name"].startswith("language:")}),
        "notes": result["notes"],
        "cpu seconds of the evaluation": result["cpu_seconds"],
        "versions": result["versions"],
    }
    text = json.dumps({"about": about, "figures": plain(figures)}, indent=1, ensure_ascii=False) + "\n"
    write_bytes(args.out / "claims.json", text.encode())
    print(json.dumps(about, ensure_ascii=False), json.dumps(plain(figures["memory"])), markdown(figures), sep="\n")


def own_text(out: Path) -> Path:
    """glm5-tiny's own calibration text."""
    path = out / "calibration.jsonl"
    export_jsonl(path, calibration_dialogues())
    return path


def measure(args: argparse.Namespace, folders: Mapping[str, Path]) -> dict[str, Any]:
    """The evaluation of the compared exports as JSON-like values."""
    own = args.talk is None
    talk = dialogues(EVALUATION_SEED, args.dialogues, args.turns, args.language) if own else args.talk
    names = [name for name in COMPARED if name in folders]
    exports = [folders[name] for name in names]
    settings: dict[str, Any] = {"num_dialogues": args.dialogues, "dtype": args.dtype, "diagnose": 0, "chunk": 512}
    found = evaluate(args.model, exports, dialogues=talk, names=names, long_dialogue=args.turns, **settings)
    return to_dict(found)


if __name__ == "__main__":
    main()
