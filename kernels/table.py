"""Launch settings by kernel, tokens and shape: a small table written by `tune.py`, and a rule for what it lacks.

Letters: N out, K in. The table holds what was measured on a device, keyed "kernel tokens n k"; empty means nothing was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

PROGRAMS_WANTED = 528  # four programs for each of the 132 multiprocessors of an H100 or H200


@dataclass(frozen=True, kw_only=True)
class Config:
    """block_r rows of weights x block_t tokens a program; K in split_k parts; warps; pipeline stages."""

    block_r: int
    block_t: int
    warps: int
    stages: int
    split_k: int = 1

    def __post_init__(self) -> None:
        for name in ("block_r", "block_t", "warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, found {value}")
        if self.block_r < 16 or self.block_t < 8 or self.stages < 1 or self.split_k < 1:
            raise ValueError(f"block_r >= 16, block_t >= 8, stages and split_k >= 1 are needed, found {self}")


TABLE: dict[str, Config] = {}


def tile_for(tokens: int) -> int:
    """Tokens a tile holds: 8, 16, 64 or 128."""
    return next((tile for tile in (8, 16, 64) if tokens <= tile), 128)


def config_for(kernel: str, tokens: int, n: int, k: int) -> Config:
    """The measured setting of this kernel ("linear", "gate_up", "down", "int8") and shape, or the rule's.

    The last tile was measured with a few hundred tokens and serves any number: more of them need fewer splits of K,
    each of which takes tokens x n numbers of memory.
    """
    tile = tile_for(tokens)
    found = TABLE.get(f"{kernel} {tile} {n} {k}")
    if found is None:
        return _rule(kernel, tile, tokens, n, k)
    most = _splits(tokens, n, found.block_r, found.block_t)
    return found if found.split_k <= most else replace(found, split_k=most)


def _rule(kernel: str, tile: int, tokens: int, n: int, k: int) -> Config:
    """Tiles as the compile-time study chose them; K is split until the device has enough programs."""
    block_r = 128
    if n <= 32:
        block_r = 32
    elif n <= 64:
        block_r = 64
    if kernel == "int8":  # two accumulators, integer and float, share the registers
        block_r, tile = min(block_r, 64), min(max(tile, 16), 64)
    split_k = 1
    if kernel in ("linear", "int8"):
        split_k = max(1, min(_splits(tokens, n, block_r, tile), -(-k // 128) // 4))
    warps = 2 if tile <= 16 else 4 if tile == 64 else 8
    return Config(block_r=block_r, block_t=tile, warps=warps, stages=4 if tile <= 16 else 3, split_k=split_k)


def _splits(tokens: int, n: int, block_r: int, block_t: int) -> int:
    """Parts of K that give the device programs enough, at least 1."""
    return max(1, PROGRAMS_WANTED // (-(-n // block_r) * -(-tokens // block_t)))
