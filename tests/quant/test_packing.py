"""Packing: hand-computed words, golden bytes of compressed-tensors, and every round trip."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5_quant.quant.packing import pack_codes, pack_zeros, unpack_codes, unpack_zeros


def random_codes(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_element_0_lies_in_the_lowest_nibble_and_element_7_in_the_highest() -> None:
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [15, 0, 0, 0, 0, 0, 0, 15]], dtype=torch.uint8)
    words = pack_codes(codes)
    assert words.dtype == torch.int32
    assert [int(w) & 0xFFFFFFFF for w in words[:, 0]] == [0x87654321, 0xF000000F]


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 40), k=st.integers(1, 70), seed=st.integers(0, 1000))
def test_codes_come_back_from_every_shape(n: int, k: int, seed: int) -> None:
    codes = random_codes(n, k, seed)
    packed = pack_codes(codes)
    assert packed.shape == (n, -(-k // 8))
    assert torch.equal(unpack_codes(packed, k), codes)
    zeros = pack_zeros(codes)
    assert zeros.shape == (-(-n // 8), k)
    assert torch.equal(unpack_zeros(zeros, n), codes)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 40), k=st.integers(1, 70), seed=st.integers(0, 1000))
def test_bytes_equal_those_of_compressed_tensors(n: int, k: int, seed: int) -> None:
    codes = random_codes(n, k, seed)
    signed = (codes.to(torch.int16) - 8).to(torch.int8)
    assert torch.equal(pack_codes(codes), pack_to_int32(signed, 4))
    assert torch.equal(pack_zeros(codes), pack_to_int32(signed, 4, packed_dim=0))
    assert torch.equal(unpack_from_int32(pack_codes(codes), 4, torch.Size((n, k))), signed)
    assert torch.equal(unpack_from_int32(pack_zeros(codes), 4, torch.Size((n, k)), packed_dim=0), signed)


@pytest.mark.parametrize(("n", "k"), [(1, 64), (60, 128), (768, 768), (2049, 64), (640, 640)])
def test_field_case_o06_shapes_round_trip_and_are_not_empty(n: int, k: int) -> None:
    codes = random_codes(n, k)
    packed = pack_codes(codes)
    assert packed.numel() == n * k // 8
    assert int(packed.count_nonzero()) > 0
    assert torch.equal(unpack_codes(packed, k), codes)


def test_a_stack_of_experts_packs_as_its_members_do() -> None:
    stack = torch.stack([random_codes(9, 20, seed) for seed in range(3)])
    assert torch.equal(pack_codes(stack), torch.stack([pack_codes(one) for one in stack]))
    assert torch.equal(unpack_zeros(pack_zeros(stack), 9), stack)


def test_what_is_no_code_or_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="16, expected"):
        pack_codes(torch.full((1, 8), 16, dtype=torch.uint8))
    with pytest.raises(ValueError, match="int8"):
        pack_codes(torch.zeros(1, 8, dtype=torch.int8))
    with pytest.raises(ValueError, match="2 words a row, expected 1"):
        unpack_codes(torch.zeros(1, 2, dtype=torch.int32), 8)
    with pytest.raises(ValueError, match="int64"):
        unpack_codes(torch.zeros(1, 1, dtype=torch.int64), 8)
