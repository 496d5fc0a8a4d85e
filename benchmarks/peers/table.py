"""Results as a Markdown table, each against a baseline, with 95% intervals (paired bootstrap over windows).

    python benchmarks/peers/table.py --baseline rtn benchmarks/peers/results/DATE-MODEL-*.json

Prints one table a source model. `--baseline` is a piece of the quantized folder's name; the last columns are the share
of the baseline's KL that a result keeps, and the same for KL at numeric tokens: below 1 is better. A dash is what is
not known: too few numeric tokens for an interval, or a baseline without divergence.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
from statistics_paired import interval, ratio, ratio_of_rates

COLUMNS = ("folder", "KL", "top-1", "perplexity", "numeric KL", "MB", "wall s", "processor s", "peak MB")


def share(of, *parts: list[float]) -> str:
    """A ratio with its interval as `of` gives it from the parts; a dash unless all three are numbers."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = of(*parts)
    return "{:.3f} [{:.3f}, {:.3f}]".format(*found) if all(map(math.isfinite, found)) else "-"


def numeric_cells(result: dict, base: dict) -> tuple[str, str]:
    """KL where a numeric token is read, and that relative to the baseline."""
    value = result["summary"].get("numeric_read_kl")
    if value is None:
        return "-", "-"
    sides = [record["per_window"] for record in (result, base)]
    parts = [side[name] for side in sides for name in ("numeric_read_kl_sum", "numeric_read_count")]
    return f"{value:.4f}", share(ratio_of_rates, *parts)


def row(result: dict, base: dict) -> list[str]:
    """Cells of one result."""
    summary, run = result["summary"], result.get("run", {})
    low, high = interval(result["per_window"]["kl"])
    numeric, numeric_share = numeric_cells(result, base)
    seconds = [run.get(name) for name in ("quantize_s", "quantize_processor_s")]
    return [
        result["quantized"],
        f"{summary['kl']:.4f} [{low:.4f}, {high:.4f}]",
        f"{100 * summary['top1']:.1f}%",
        f"{summary['perplexity']:.2f}",
        numeric,
        f"{result['stored_bytes'] / 1e6:.1f}",
        *("" if value is None else f"{value:.0f}" for value in seconds),
        f"{run['peak_rss_bytes'] / 1e6:.0f}" if run else "",
        share(ratio, result["per_window"]["kl"], base["per_window"]["kl"]),
        numeric_share,
    ]


def table(results: list[dict], baseline: str) -> str:
    """Markdown, best KL first."""
    bases = [result for result in results if baseline in result["quantized"]]
    if len(bases) != 1:
        raise ValueError(
            f"{len(bases)} of {len(results)} results have {baseline!r} in their name; exactly one is needed"
        )
    heads = [*COLUMNS, f"KL / {bases[0]['quantized']}", "numeric KL / same"]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    ranked = sorted(results, key=lambda result: result["summary"]["kl"])
    return "\n".join(lines + ["| " + " | ".join(row(result, bases[0])) + " |" for result in ranked])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="files that score.py wrote")
    parser.add_argument("--baseline", default="rtn")
    args = parser.parse_args()
    sources: dict[str, list[dict]] = {}
    for path in args.results:
        result = json.loads(path.read_text())
        if "per_window" in result:
            sources.setdefault(result["source"], []).append(result)
    for source, results in sources.items():
        print(f"### {source}\n\n{table(results, args.baseline)}\n")


if __name__ == "__main__":
    main()
