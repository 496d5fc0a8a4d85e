"""One scorer for every INT4 folder: KL(source || quantized), top-1 agreement, perplexity, KL at numeric tokens.

    python benchmarks/peers/score.py --source MODEL --tokens tokens.safetensors --out DIR --quantized A B C

Each folder is turned into plain float32 weights by the rules of its format (dequantize.py) and run by `transformers` in
float32, as the source is: nobody's runtime takes part. One JSON a folder is written to DIR, with the figures of every
window, so that two results can be compared window by window (table.py). `--runtime` loads folders through glm5-quant
instead, for exports whose sidecar (shadows, compensation, activations, online rotation) belongs to the result.

A position counts as numeric where the token to be predicted is one (`numeric_kl`), or where the token read is one
(`numeric_read_kl`); a numeric token is a vocabulary entry whose text, without a leading space, is all decimal digits.
"""

import argparse
import json
import tempfile
from datetime import date
from pathlib import Path

import glm5_tiny
import torch
from dequantize import read_folder
from peer_common import one_thread, versions
from safetensors.torch import load_file, save_file
from statistics_paired import interval
from transformers import AutoModelForCausalLM, AutoTokenizer


def load_plain(folder: Path):
    """A folder, quantized or not, as a float32 transformers model; experts are fused by transformers itself."""
    config, tensors = read_folder(folder)
    if glm5_tiny.is_glm5(folder):
        glm5_tiny.register()
        tensors = glm5_tiny.fuse(tensors)
    with tempfile.TemporaryDirectory() as scratch:
        config["dtype"] = "float32"
        config.pop("torch_dtype", None)
        (Path(scratch) / "config.json").write_text(json.dumps(config))
        save_file({name: t.contiguous().clone() for name, t in tensors.items()}, Path(scratch) / "model.safetensors")
        model, info = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32, output_loading_info=True)
    wrong = {key: sorted(info[key])[:3] for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]}
    if wrong:
        raise ValueError(f"{folder.name}: the plain weights do not fit the model: {wrong}")
    return model.eval()


def load_runtime(folder: Path):
    """The folder through glm5-quant's own runtime, sidecar included."""
    from glm5_quant.model import load

    return load(folder, dtype=torch.float32).eval()


def numeric_ids(folder: Path) -> torch.Tensor:
    """Ids [M] of the vocabulary's digit tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return torch.tensor([i for i in range(len(tokenizer)) if tokenizer.decode([i]).strip().isdecimal()])


class Tally:
    """Per-window figures of one quantized model against the source."""

    def __init__(self) -> None:
        self.windows: dict[str, list[float]] = {}

    def add(self, source_TV: torch.Tensor, other_TV: torch.Tensor, ids_T: torch.Tensor, numeric: torch.Tensor) -> None:
        source, other = source_TV.log_softmax(-1), other_TV.log_softmax(-1)
        kl_T = (source.exp() * (source - other)).sum(-1)
        target_T = ids_T[1:]
        predicted = torch.isin(target_T, numeric)
        read = torch.isin(ids_T, numeric)
        row = {
            "kl": kl_T.mean(),
            "top1": (source_TV.argmax(-1) == other_TV.argmax(-1)).float().mean(),
            "nll": -other[:-1].gather(1, target_T[:, None]).mean(),
            "source_nll": -source[:-1].gather(1, target_T[:, None]).mean(),
            "numeric_kl_sum": kl_T[:-1][predicted].sum(),
            "numeric_count": predicted.sum(),
            "numeric_read_kl_sum": kl_T[read].sum(),
            "numeric_read_count": read.sum(),
        }
        for name, value in row.items():
            self.windows.setdefault(name, []).append(float(value))

    def summary(self) -> dict[str, float]:
        mean = {name: sum(values) / len(values) for name, values in self.windows.items()}
        exp = {name: float(torch.tensor(mean[name]).exp()) for name in ("nll", "source_nll")}
        low, high = interval(self.windows["kl"])
        out = {"kl": mean["kl"], "kl_low": low, "kl_high": high, "top1": mean["top1"]}
        out |= {"perplexity": exp["nll"], "source_perplexity": exp["source_nll"]}
        for name in ("numeric", "numeric_read"):
            if mean[f"{name}_count"]:
                out[f"{name}_kl"] = mean[f"{name}_kl_sum"] / mean[f"{name}_count"]
        return out


@torch.inference_mode()
def score(source, others: list, tokens_WT: torch.Tensor, numeric: torch.Tensor) -> list[Tally]:
    """One Tally for each of `others`; logits of a window are dropped before the next."""
    tallies = [Tally() for _ in others]
    for ids_T in tokens_WT:
        source_TV = source(ids_T[None]).logits[0].float()
        for tally, other in zip(tallies, others, strict=True):
            tally.add(source_TV, other(ids_T[None]).logits[0].float(), ids_T, numeric)
    return tallies


def stored_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, required=True, help="file that tokens.py wrote")
    parser.add_argument("--quantized", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for DATE-SOURCE-NAME.json")
    parser.add_argument("--runtime", action="store_true", help="load through glm5-quant, sidecar included")
    parser.add_argument("--windows", type=int, help="use only the first of them (a trial run)")
    args = parser.parse_args()
    one_thread()
    tokens_WT = load_file(args.tokens)["evaluation"][: args.windows]
    source = load_plain(args.source)
    others = [(load_runtime if args.runtime else load_plain)(folder) for folder in args.quantized]
    tallies = score(source, others, tokens_WT, numeric_ids(args.source))
    args.out.mkdir(parents=True, exist_ok=True)
    for folder, tally in zip(args.quantized, tallies, strict=True):
        record = {
            "date": date.today().isoformat(),
            "source": args.source.name,
            "quantized": folder.name,
            "windows": list(tokens_WT.shape),
            "stored_bytes": stored_bytes(folder),
            "scorer": versions("safetensors"),
            "summary": {name: round(value, 5) for name, value in tally.summary().items()},
            "per_window": {name: [round(v, 6) for v in values] for name, values in tally.windows.items()},
        }
        if (folder / "peer.json").exists():
            record["run"] = json.loads((folder / "peer.json").read_text())
        target = args.out / f"{record['date']}-{args.source.name}-{folder.name}.json"
        target.write_text(json.dumps(record, indent=1) + "\n")
        print(target.name, json.dumps(record["summary"]))


if __name__ == "__main__":
    main()
