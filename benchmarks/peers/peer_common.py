"""What the peer runners share: reading the tokens, the clock, the memory mark, the record. No more than torch."""

import json
import os
import resource
import sys
import time
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file


def one_thread() -> None:
    """One compute thread, unless OMP_NUM_THREADS says otherwise."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def calibration_tokens(path: Path, count: int | None = None) -> torch.Tensor:
    """The calibration windows [count, length] int64 that tokens.py wrote."""
    return load_file(path)["calibration"][:count]


def group_for(columns: int, group_size: int) -> int:
    """Group size for a matrix with this many input columns.

    The peers refuse a ragged last group, so a matrix whose columns `group_size` does not divide gets the largest
    divisor at or below it: never coarser than ours, so the peer loses nothing (32 -> 32; 172 -> 43, four groups for
    our three).
    """
    return next(size for size in range(group_size, 0, -1) if columns % size == 0)


def uneven_linears(model: Path, group_size: int) -> dict[str, int]:
    """Linears of a folder whose width `group_size` does not divide, with the group they get (see `group_for`)."""
    found = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, "pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - a handle is not a dict
                shape = handle.get_slice(name).get_shape()
                if name.endswith("_proj.weight") and len(shape) == 2 and shape[1] % group_size:
                    found[name.removesuffix(".weight")] = group_for(shape[1], group_size)
    return found


class Clock:
    """Seconds of the quantization itself: on the wall, and on the processor (which a busy machine disturbs less)."""

    def __init__(self) -> None:
        self.wall_s = self.processor_s = 0.0

    @contextmanager
    def running(self):
        wall_s, processor_s = time.perf_counter(), time.process_time()
        yield
        self.wall_s += time.perf_counter() - wall_s
        self.processor_s += time.process_time() - processor_s


def versions(*packages: str) -> dict[str, str]:
    """Installed versions of the packages that exist here."""
    found = {"python": sys.version.split()[0]}
    for package in ("torch", "transformers", *packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write_record(out: Path, clock: Clock, **facts) -> None:
    """`peer.json` beside the model: settings, seconds, peak resident memory, versions, load when it ended."""
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    record = {
        **facts,
        "quantize_s": round(clock.wall_s, 1),
        "quantize_processor_s": round(clock.processor_s, 1),
        "peak_rss_bytes": peak_bytes,
        "threads": torch.get_num_threads(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "nice": os.nice(0),
    }
    (out / "peer.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))
