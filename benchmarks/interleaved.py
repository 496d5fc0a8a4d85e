"""Time contenders by turns, so that a busy machine slows all of them alike; shared by the CPU benchmarks.

A turn runs every contender once. Medians over the turns; CPU seconds of the one thread that works, which other
processes cannot stretch the way they stretch wall time, with wall time beside them.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch


class Timing(NamedTuple):
    """Medians in milliseconds, and the quartiles of the CPU time."""

    cpu_ms: float
    wall_ms: float
    low_ms: float
    high_ms: float


def interleave(contenders: Mapping[str, Callable[[], object]], turns: int) -> dict[str, Timing]:
    """The medians of `turns` turns after one that does not count."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for turn in range(turns + 1):
        for name, run in contenders.items():
            cpu, wall = time.thread_time(), time.perf_counter()
            run()
            if turn:
                times[name].append((time.thread_time() - cpu, time.perf_counter() - wall))
    return {name: _timing(pairs) for name, pairs in times.items()}


def _timing(pairs: list[tuple[float, float]]) -> Timing:
    cpu = [1000 * pair[0] for pair in pairs]
    low, middle, high = statistics.quantiles(cpu, n=4)
    return Timing(middle, statistics.median(1000 * pair[1] for pair in pairs), low, high)


def machine() -> str:
    """One line that says what was measured on, and how busy it was."""
    names = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]  # noqa: SIM115, PTH123
    cpu = names[0] if names else platform.processor()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{cpu}, one thread, torch {torch.__version__}, load {load} on {os.cpu_count()} cores"


def row(name: str, timings: Mapping[str, Timing], base: str) -> str:
    """A Markdown row: how many times faster than `base` each contender is, by CPU time, with its milliseconds."""
    cells = [f"{timings[base].cpu_ms / t.cpu_ms:.2f}x ({t.cpu_ms:.2f})" for t in timings.values()]
    return f"| {name} | {' | '.join(cells)} |"
