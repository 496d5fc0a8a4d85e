"""Wall time and peak memory of `glm5-quant calibrate` against llm-compressor's GPTQ: one thread each, turn about.

    python benchmarks/speed_vs_llmcompressor.py --model MODEL --tokens tokens.safetensors --dataset calibration.jsonl \\
        --peer-python PEER_VENV/bin/python --out benchmarks/peers/results

`tokens.safetensors` and `calibration.jsonl` come from peers/tokens.py (`--text-out`): the same text for both. Ours,
theirs, ours, theirs; medians are compared. Ours is timed as a whole process, interpreter start, model reading and
journal included; theirs around the quantization alone, and as a whole process beside it: what is asserted is the
stricter ratio. Peak memory is the resident set of each whole process. Exits 1 where a limit is passed.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

PEER = Path(__file__).parent / "peers" / "run_llmcompressor.py"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One process from start to end."""

    side: str
    wall_s: float
    processor_s: float
    quantize_s: float
    peak_rss_bytes: int
    load_average: float


def run(side: str, command: list[str], log: Path) -> Turn:
    """Run to the end with one thread; peak memory is the kernel's own mark for this process."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    environment = os.environ | one | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment.pop("PYTHONSAFEPATH", None)  # the peer's script finds its helper beside itself
    load, start = os.getloadavg()[0], time.perf_counter()
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall_s = time.perf_counter() - start
    if process.returncode:
        sys.exit(f"{side} failed:\n{log.read_text(errors='replace')[-3000:]}")
    return Turn(
        side=side,
        wall_s=round(wall_s, 2),
        processor_s=round(usage.ru_utime + usage.ru_stime, 2),
        quantize_s=round(wall_s, 2),
        peak_rss_bytes=usage.ru_maxrss * 1024,
        load_average=round(load, 2),
    )


def ours(args, scratch: Path) -> Turn:
    command = [*args.ours.split(), "calibrate", "--model", str(args.model), "--dataset", str(args.dataset)]
    command += ["--num-samples", str(args.windows), "--seqlen", "512", "--preset", args.preset, "--resume", "never"]
    command += ["--work-dir", str(scratch / "ours"), "--overwrite"]
    return run("glm5-quant", command, scratch / "ours.log")


def theirs(args, scratch: Path) -> Turn:
    out = scratch / "theirs"
    shutil.rmtree(out, ignore_errors=True)
    command = [args.peer_python, str(PEER), "--model", str(args.model), "--tokens", str(args.tokens), "--out", str(out)]
    command += ["--method", "gptq", "--damp", str(args.damp), "--windows", str(args.windows)]
    turn = run("llm-compressor", command, scratch / "theirs.log")
    quantize_s = json.loads((out / "peer.json").read_text())["quantize_s"]
    return Turn(**(asdict(turn) | {"quantize_s": quantize_s}))


def median(turns: list[Turn], side: str, field: str) -> float:
    return statistics.median(getattr(turn, field) for turn in turns if turn.side == side)


def compare(turns: list[Turn]) -> dict[str, float]:
    """Ratios ours / theirs of the medians."""
    pairs = {
        "wall_ratio_strict": ("wall_s", "quantize_s"),
        "wall_ratio": ("wall_s", "wall_s"),
        "processor_ratio": ("processor_s", "processor_s"),
        "peak_rss_ratio": ("peak_rss_bytes", "peak_rss_bytes"),
    }
    return {
        name: round(median(turns, "glm5-quant", mine) / median(turns, "llm-compressor", other), 4)
        for name, (mine, other) in pairs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--peer-python", required=True, help="python of the venv that has llm-compressor")
    parser.add_argument("--ours", default="glm5-quant", help="our command")
    parser.add_argument("--preset", default="default")
    parser.add_argument("--damp", type=float, default=0.01)
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit", type=float, default=0.7, help="largest allowed ratio of wall times")
    parser.add_argument(
        "--memory-limit", type=float, help="largest allowed ratio of peak memory (not asserted if absent)"
    )
    parser.add_argument("--keep", type=Path, help="folder where both sides' last output stays")
    parser.add_argument("--out", type=Path, help="folder for DATE-speed-MODEL-PRESET.json")
    args = parser.parse_args()
    turns: list[Turn] = []
    with tempfile.TemporaryDirectory() as temporary:
        scratch = args.keep or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        for _ in range(args.rounds):
            for side in (ours, theirs):
                turns.append(side(args, scratch))
                print(json.dumps(asdict(turns[-1])), flush=True)
    ratios = compare(turns)
    settings = {name: getattr(args, name) for name in ("preset", "damp", "windows", "rounds", "limit")}
    record = {"date": date.today().isoformat(), "model": args.model.name, **settings, "cores": os.cpu_count()}
    record |= {"ratios": ratios, "turns": [asdict(turn) for turn in turns]}
    print(json.dumps(ratios))
    if args.out:
        target = args.out / f"{record['date']}-speed-{args.model.name}-{args.preset}.json"
        target.write_text(json.dumps(record, indent=1) + "\n")
    late = ratios["wall_ratio_strict"] > args.limit
    heavy = args.memory_limit is not None and ratios["peak_rss_ratio"] > args.memory_limit
    sys.exit(int(late or heavy))


if __name__ == "__main__":
    main()
