"""How long `glm5-quant --help` takes: the middle and the worst of ten whole processes. Limit: 0.5 s.

    python benchmarks/startup.py

Wall time counts on an idle machine only: a busy one measures its other work. CPU time hardly depends on it.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time

RUNS = 10
LIMIT_S = 0.5
COMMANDS = (["--help"], ["calibrate", "--help"], ["eval", "--help"])


def seconds(arguments: list[str]) -> tuple[float, float]:
    """Wall and CPU time of one run, from start to exit."""
    code = "from glm5_quant.cli.main import run; run()"
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", code, *arguments], stdout=subprocess.DEVNULL, check=True)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - start
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    """Print one line a command; 1 if a middle wall time is over the limit."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    slow = 0
    for arguments in COMMANDS:
        wall, cpu = zip(*(seconds(arguments) for _ in range(RUNS)), strict=True)
        middle = statistics.median(wall)
        slow += middle > LIMIT_S
        shown = f"median {middle:.3f} s  worst {max(wall):.3f} s  CPU median {statistics.median(cpu):.3f} s"
        print(f"glm5-quant {' '.join(arguments):<18} {shown}")
    return int(slow > 0)


if __name__ == "__main__":
    sys.exit(main())
