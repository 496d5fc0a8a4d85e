"""Measure launch settings on the GPU at hand and write them into the table: ``python -m glm5_quant.kernels.tune``.

Letters: N out, K in. Nothing is tuned at import or at run time: what this prints is pasted (or written, with --write)
as the dictionary of table.py, dated by the commit that carries it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from glm5_quant.kernels import table
from glm5_quant.kernels.layout import PackedMatrix, block_count, padded_k
from glm5_quant.kernels.table import Config

SHAPES = ("2048x6144", "6144x2048", "4096x6144", "6144x12288")
TOKENS = (1, 16, 64, 256)
MARK = "TABLE: dict[str, Config] = {"


def candidates(tokens: int) -> Iterator[Config]:
    """The settings worth a try for this many tokens; all of them compute the same."""
    tile = table.tile_for(tokens)
    rows = (64, 128) if tile <= 16 else (128, 256) if tile == 64 else (128,)
    warps = (1, 2, 4) if tile <= 16 else (4, 8)
    for block_r, warp, stages, split_k in itertools.product(rows, warps, (2, 3, 4, 5), (1, 2, 4, 8, 16)):
        yield Config(block_r=block_r, block_t=tile, warps=warp, stages=stages, split_k=split_k)


def random_matrix(n: int, k: int, device: str) -> PackedMatrix:
    """A matrix of random bytes: timing does not depend on the values."""
    codes = torch.randint(0, 256, (n, padded_k(k) // 2), dtype=torch.uint8, device=device)
    zero = torch.randint(0, 16, (n, block_count(k)), dtype=torch.uint8, device=device)
    return PackedMatrix(codes, torch.full((n, block_count(k)), 0.01, dtype=torch.bfloat16, device=device), zero, n, k)


def best(run: Callable[[Config], float], settings: Iterator[Config]) -> tuple[Config, float]:
    """The fastest setting and its time; a setting that does not fit the device is passed over and named."""
    fastest: tuple[Config, float] | None = None
    for config in settings:
        try:
            time_ms = run(config)
        except Exception as error:  # Triton raises its own kinds for too much shared memory or too many registers
            print(f"  {config}: {type(error).__name__}", file=sys.stderr)
            continue
        if fastest is None or time_ms < fastest[1]:
            fastest = config, time_ms
    if fastest is None:
        raise ValueError("no setting ran on this device")
    return fastest


def tune(shapes: list[tuple[int, int]], tokens: list[int]) -> dict[str, Config]:
    """The fastest setting of the linear kernel for each shape and tile of tokens, on the current GPU."""
    from triton.testing import do_bench

    from glm5_quant.kernels import linear_triton

    found = {}
    for (n, k), count in itertools.product(shapes, tokens):
        packed = random_matrix(n, k, "cuda")
        x = torch.randn(count, k, dtype=torch.bfloat16, device="cuda")

        def run(config: Config, x: torch.Tensor = x, packed: PackedMatrix = packed) -> float:
            return float(do_bench(lambda: linear_triton.linear(x, packed, None, config)))

        config, time_ms = best(run, candidates(count))
        found[f"linear {table.tile_for(count)} {n} {k}"] = config
        print(f"{n} x {k}, {count} tokens: {time_ms * 1000:.1f} us with {config}", file=sys.stderr)
    return found


def render(found: dict[str, Config]) -> str:
    """The dictionary as source."""
    return "\n".join([MARK, *(f'    "{key}": {config!r},' for key, config in sorted(found.items())), "}"])


def write(found: dict[str, Config], path: Path) -> None:
    """Replace the dictionary in table.py, keeping entries of other shapes."""
    source = path.read_text()
    start = source.index(MARK)
    end = source.index("}", start) + 1
    path.write_text(source[:start] + render({**table.TABLE, **found}) + source[end:])


def main(arguments: list[str] | None = None) -> None:
    """Command line: shapes and tokens in, the table's source out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="NxK")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--write", action="store_true", help="into table.py instead of stdout")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("tuning needs a GPU")
    shapes = [(int(n), int(k)) for n, k in (shape.split("x") for shape in options.shapes)]
    found = tune(shapes, options.tokens)
    if options.write:
        write(found, Path(table.__file__))
    else:
        print(render(found))


if __name__ == "__main__":
    main()
