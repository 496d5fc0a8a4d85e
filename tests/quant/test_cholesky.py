"""The blocked Cholesky equals LAPACK's, for sizes below, at and above its block, and says which matrices failed."""

from __future__ import annotations

import pytest
import torch
from quant_samples import layer_inputs, moments_of

from glm5_quant.quant.cholesky import cholesky
from glm5_quant.quant.threads import one_thread, share_out


@pytest.mark.parametrize("k", [1, 383, 384, 385, 800])
def test_the_blocked_factor_equals_the_direct_one(k: int) -> None:
    matrix = moments_of(layer_inputs(1000, k)).double() + torch.eye(k)
    factor, ok = cholesky(matrix[None])
    assert bool(ok.all())
    torch.testing.assert_close(factor[0], torch.linalg.cholesky(matrix))


def test_a_factor_made_in_place_has_the_same_bits() -> None:
    matrices = torch.stack([moments_of(layer_inputs(1000, 800)) + torch.eye(800), torch.eye(800)])
    factor, _ = cholesky(matrices)
    again, ok = cholesky(matrices, in_place=True)
    assert bool(ok.all())
    assert again.data_ptr() == matrices.data_ptr()
    assert torch.equal(again, factor)


def test_a_matrix_that_fails_in_a_late_block_is_named_and_its_neighbours_are_not_harmed() -> None:
    good = torch.eye(500)
    bad = good.clone()
    bad[450, 450] = -1.0
    factor, ok = cholesky(torch.stack([good, bad, good]))
    assert ok.tolist() == [True, False, True]
    assert torch.equal(factor[2], good)


@pytest.mark.parametrize("threads", [1, 3])
def test_pieces_are_shared_out_whatever_the_number_of_threads_and_the_setting_is_restored(threads: int) -> None:
    torch.set_num_threads(threads)
    seen = torch.zeros(20)
    try:

        def work(i: int) -> None:
            assert torch.get_num_threads() == 1
            seen[i] = i

        share_out(work, range(20))
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(1)
    assert torch.equal(seen, torch.arange(20.0))


def test_an_error_in_a_piece_reaches_the_caller() -> None:
    def work(i: int) -> None:
        raise ValueError(f"piece {i}")

    with pytest.raises(ValueError, match="piece 0"):
        share_out(work, range(3))
