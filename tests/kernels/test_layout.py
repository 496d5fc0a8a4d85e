"""The kernel layout goes both ways without changing a code, and its padding is worth nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_kernels import random_parts

from glm5_quant.kernels.layout import (
    PackedMatrix,
    Shadow,
    dequantize,
    expert,
    from_codes,
    rows,
    to_codes,
    unpack_planes,
)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 9), k=st.integers(1, 400), experts=st.sampled_from([0, 1, 3]), seed=st.integers(0, 99))
def test_every_shape_comes_back_bit_for_bit(n: int, k: int, experts: int, seed: int) -> None:
    lead = (experts,) if experts else ()
    codes, scale, zero = random_parts(n, k, lead, seed)
    packed = from_codes(codes, scale, zero)
    assert packed.codes.shape == (*lead, n, -(-k // 128) * 64)
    assert torch.equal(to_codes(packed), codes)


def test_a_byte_holds_the_same_position_of_two_neighbouring_blocks() -> None:
    codes = torch.zeros(1, 256, dtype=torch.uint8)
    codes[0, 5], codes[0, 64 + 5], codes[0, 128 + 63], codes[0, 192 + 63] = 3, 9, 15, 1
    packed = from_codes(codes, torch.ones(1, 4), torch.zeros(1, 4, dtype=torch.uint8))
    assert packed.codes[0, 5] == 3 | 9 << 4
    assert packed.codes[0, 64 + 63] == 15 | 1 << 4
    assert int(packed.codes.count_nonzero()) == 2


def test_all_sixteen_codes_survive_in_both_nibbles() -> None:
    low, high = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    codes = torch.stack([low.reshape(-1), high.reshape(-1)], dim=-1).to(torch.uint8)
    codes = codes.repeat_interleave(64, dim=1)
    packed = from_codes(codes, torch.ones(256, 2), torch.zeros(256, 2, dtype=torch.uint8))
    assert torch.equal(to_codes(packed), codes)
    assert torch.equal(unpack_planes(packed.codes), codes)


@pytest.mark.parametrize("k", [1, 63, 64, 65, 127, 129, 190])
def test_padding_inside_the_ragged_block_repeats_its_zero_point(k: int) -> None:
    codes, scale, zero = random_parts(3, k)
    planes = unpack_planes(from_codes(codes, scale, zero).codes)
    stop = -(-k // 64) * 64
    assert torch.equal(planes[:, k:stop], zero[:, -1:].expand(3, stop - k))


@pytest.mark.parametrize(("n", "k"), [(1, 64), (60, 128), (768, 768), (2049, 64), (2048, 64), (5, 100)])
def test_weights_are_code_minus_zero_times_scale(n: int, k: int) -> None:
    codes, scale, zero = random_parts(n, k)
    block = torch.arange(k) // 64
    expected = (codes.double() - zero[:, block].double()) * scale[:, block].double()
    assert torch.allclose(dequantize(from_codes(codes, scale, zero)).double(), expected, rtol=1e-7, atol=0)


def test_rows_and_experts_are_views_of_the_stack() -> None:
    codes, scale, zero = random_parts(6, 130, (3,))
    packed = from_codes(codes, scale, zero)
    part = rows(expert(packed, 2), 2, 99)
    assert (part.n, part.k, part.experts) == (4, 130, None)
    assert torch.equal(to_codes(part), codes[2, 2:])
    assert part.codes.untyped_storage().data_ptr() == packed.codes.untyped_storage().data_ptr()


def test_an_expert_takes_only_its_own_shadow_columns() -> None:
    codes, scale, zero = random_parts(4, 64, (3,))
    residual = torch.arange(20.0).reshape(5, 4)
    shadow = Shadow(torch.tensor([3, 9, 1, 0, 7]), residual, torch.tensor([0, 2, 2, 5]))
    packed = from_codes(codes, scale, zero, shadow=shadow)
    assert expert(packed, 1).shadow is None
    last = expert(packed, 2).shadow
    assert last is not None
    assert last.columns.tolist() == [1, 0, 7]
    assert torch.equal(last.residual, residual[2:])


def test_a_matrix_moves_between_devices_with_its_shadow() -> None:
    codes, scale, zero = random_parts(4, 64)
    shadow = Shadow(torch.tensor([3]), torch.ones(1, 4, dtype=torch.int8), torch.tensor([0, 1]), torch.ones(1))
    moved = from_codes(codes, scale, zero, shadow=shadow, resident="int8").to("meta")
    assert moved.codes.is_meta and moved.scale.is_meta and moved.resident == "int8"
    assert moved.shadow is not None and moved.shadow.residual.is_meta


def test_wrong_parts_are_refused_by_name() -> None:
    codes, scale, zero = random_parts(4, 64)
    with pytest.raises(ValueError, match=r"codes must be uint8"):
        from_codes(codes.int(), scale, zero)
    with pytest.raises(ValueError, match=r"0\.\.15, found 16"):
        from_codes(codes + 16 * (codes == codes.max()).to(torch.uint8) - codes, scale, zero)
    with pytest.raises(ValueError, match=r"packed scale: expected .* \(4, 1\), found torch.float32 \(4, 2\)"):
        from_codes(codes, scale.repeat(1, 2), zero)
    with pytest.raises(ValueError, match=r"packed zero: expected uint8"):
        from_codes(codes, scale, zero.int())
    with pytest.raises(ValueError, match=r"resident must be int4 or int8"):
        from_codes(codes, scale, zero, resident="int2")
    with pytest.raises(ValueError, match=r"at least 1"):
        PackedMatrix(codes, scale, zero, 0, 64)
    with pytest.raises(ValueError, match=r"shadow residual"):
        Shadow(torch.tensor([1]), torch.ones(2, 4), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"only if, its residual is int8"):
        Shadow(torch.tensor([1]), torch.ones(1, 4), torch.tensor([0, 1]), torch.ones(1))
