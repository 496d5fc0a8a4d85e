"""Results as a Markdown table, each against a baseline, with 95% intervals (paired bootstrap over windows).

    python benchmarks/peers/table.py --baseline rtn benchmarks/peers/results/DATE-MODEL-*.json

Prints one table a source model. `--baseline` is a piece of the quantized folder's name; the last columns are the share
of the baseline's KL that a result keeps, and the same for KL at numeric tokens: below 1 is better.
"""

import argparse
import json
from pathlib import Path

from statistics_paired import interval, ratio, ratio_of_rates

COLUMNS = ("folder", "KL", "top-1", "perplexity", "numeric KL", "MB", "wall s", "processor s", "peak MB")


def numeric_ratio(result: dict, base: dict) -> str:
    """KL where a numeric token is read, relative to the baseline."""
    sides = [record["per_window"] for record in (result, base)]
    parts = [side[name] for side in sides for name in ("numeric_read_kl_sum", "numeric_read_count")]
    return "{:.3f} [{:.3f}, {:.3f}]".format(*ratio_of_rates(*parts))


def row(result: dict, base: dict) -> list[str]:
    """Cells of one result."""
    summary, run = result["summary"], result.get("run", {})
    low, high = interval(result["per_window"]["kl"])
    seconds = [run.get(name) for name in ("quantize_s", "quantize_processor_s")]
    return [
        result["quantized"],
        f"{summary['kl']:.4f} [{low:.4f}, {high:.4f}]",
        f"{100 * summary['top1']:.1f}%",
        f"{summary['perplexity']:.2f}",
        f"{summary['numeric_read_kl']:.4f}" if "numeric_read_kl" in summary else "",
        f"{result['stored_bytes'] / 1e6:.1f}",
        *("" if value is None else f"{value:.0f}" for value in seconds),
        f"{run['peak_rss_bytes'] / 1e6:.0f}" if run else "",
        "{:.3f} [{:.3f}, {:.3f}]".format(*ratio(result["per_window"]["kl"], base["per_window"]["kl"])),
        numeric_ratio(result, base) if "numeric_read_kl" in summary else "",
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
