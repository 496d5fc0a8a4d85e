"""Codes and zero-points in the `pack-quantized` format of compressed-tensors.

Dimensions: E leading batch (experts), N out, K in, B blocks along K.
Eight 4-bit values lie in an int32, element 0 in the lowest nibble; a code 0..15 is stored as it is, which is what the
format calls q + 8 of the signed value. Missing elements of the last word are nibbles of 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

PER_WORD = 8
BYTES_PER_WORD = 4


def pack_codes(codes_NK: Tensor) -> Tensor:
    """uint8 [..., N, K] with values 0..15 -> int32 [..., N, ceil(K/8)].

    Raises ValueError for another dtype or a value above 15 (a nibble would silently spill into its neighbour).
    """
    if codes_NK.dtype != torch.uint8:
        raise ValueError(f"codes are {codes_NK.dtype}, expected torch.uint8")
    if codes_NK.numel() and int(codes_NK.max()) > 15:
        raise ValueError(f"a code is {int(codes_NK.max())}, expected 0..15")
    k = codes_NK.shape[-1]
    if k % PER_WORD:
        codes_NK = torch.nn.functional.pad(codes_NK, (0, -k % PER_WORD))
    # Two nibbles make a byte, four bytes a little-endian word: far fewer passes than eight 32-bit shifts.
    byte = codes_NK[..., 0::2] | (codes_NK[..., 1::2] << 4)
    return _words(byte)


def unpack_codes(packed: Tensor, k: int) -> Tensor:
    """int32 [..., N, ceil(k/8)] -> uint8 [..., N, k]. Raises ValueError when the width cannot hold exactly k codes."""
    return _unpack(packed, k, PER_WORD)


def pack_bytes(codes_NK: Tensor) -> Tensor:
    """8-bit codes, uint8 [..., N, K], stored as q + 128 -> int32 [..., N, ceil(K/4)], element 0 in the lowest byte."""
    if codes_NK.dtype != torch.uint8:
        raise ValueError(f"codes are {codes_NK.dtype}, expected torch.uint8")
    return _words(torch.nn.functional.pad(codes_NK, (0, -codes_NK.shape[-1] % BYTES_PER_WORD)))


def unpack_bytes(packed: Tensor, k: int) -> Tensor:
    """int32 [..., N, ceil(k/4)] -> uint8 [..., N, k]. Raises ValueError when the width cannot hold exactly k codes."""
    return _unpack(packed, k, BYTES_PER_WORD)


def _words(byte: Tensor) -> Tensor:
    """Four bytes make a little-endian word: uint8 [..., 4 W] -> int32 [..., W]."""
    parts = byte.reshape(*byte.shape[:-1], byte.shape[-1] // BYTES_PER_WORD, BYTES_PER_WORD).to(torch.int32)
    return parts[..., 0] | (parts[..., 1] << 8) | (parts[..., 2] << 16) | (parts[..., 3] << 24)


def _unpack(packed: Tensor, k: int, per_word: int) -> Tensor:
    """The first k codes of rows of words that hold `per_word` codes each, the first in the lowest bits."""
    if packed.dtype != torch.int32:
        raise ValueError(f"packed codes are {packed.dtype}, expected torch.int32")
    if packed.shape[-1] != -(-k // per_word):
        raise ValueError(f"{packed.shape[-1]} words a row, expected {-(-k // per_word)} for {k} codes")
    bits = 32 // per_word
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    mask = (1 << bits) - 1
    codes = ((packed.unsqueeze(-1) >> shifts) & mask).to(torch.uint8)
    return codes.flatten(-2)[..., :k].contiguous()


def pack_zeros(zero_NB: Tensor) -> Tensor:
    """uint8 [..., N, B] -> int32 [..., ceil(N/8), B], packed along N."""
    return pack_codes(zero_NB.transpose(-1, -2)).transpose(-1, -2).contiguous()


def unpack_zeros(packed: Tensor, n: int) -> Tensor:
    """int32 [..., ceil(n/8), B] -> uint8 [..., n, B]."""
    return unpack_codes(packed.transpose(-1, -2), n).transpose(-1, -2).contiguous()
