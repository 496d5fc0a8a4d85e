"""The C kernels compute the codes' own weights, stay inside their memory, and step aside where they cannot be built."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support_kernels import (
    experts_float64,
    poison,
    random_packed,
    random_routing,
    random_shadow,
    random_tokens,
    relative_error,
)

from glm5_quant.kernels import native
from glm5_quant.kernels.dispatch import experts, linear
from glm5_quant.kernels.inputs import dequantize, quantize
from glm5_quant.kernels.layout import from_codes
from glm5_quant.model.modules import EightLinear

EXACT, BF16 = 1e-6, 6e-3
needs_native = pytest.mark.skipif(native.library() is None, reason="no native kernels on this machine")


@pytest.fixture
def fresh() -> Iterator[None]:
    """`library()` looks again, before and after."""
    native.library.cache_clear()
    yield
    native.library.cache_clear()


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (1, 64), (40, 190), (97, 700)])
def test_few_tokens_meet_exact_integers_and_float32_scales(n: int, k: int, dtype: torch.dtype) -> None:
    packed, weight = random_packed(n, k, dtype=dtype, shadow=random_shadow(n, k, [3]))
    for tokens in range(1, native.FEW_ROWS + 2):
        x = random_tokens(tokens, k, torch.bfloat16)
        bound = EXACT if tokens <= native.EXACT_ROWS else 2 * BF16  # a single output can cancel
        assert relative_error(native.linear(x, packed, torch.float32), x.double() @ weight.T) < bound


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("int8", [False, True])
def test_many_tokens_meet_weights_rounded_once(dtype: torch.dtype, int8: bool) -> None:
    packed, weight = random_packed(130, 700, dtype=dtype, shadow=random_shadow(130, 700, [5], int8=int8))
    rounded = weight.bfloat16().double()
    for tokens in (3, 8, 9, 10, 11, 16, 17, 20, 24, 25, 33, 48, 129, 256, 257, 265, 530):
        x = random_tokens(tokens, 700, torch.bfloat16)
        found = native.linear(x, packed, torch.float32)
        assert relative_error(found, x.double() @ weight.T) < BF16
        assert relative_error(found, x.double() @ rounded.T) < BF16


@needs_native
def test_more_tokens_without_a_shadow_equal_bf16_weights_to_float32_accuracy() -> None:
    packed, weight = random_packed(130, 700, dtype=torch.bfloat16)
    for tokens in (3, 5, 10, 37):
        x = random_tokens(tokens, 700, torch.bfloat16)
        found = native.linear(x, packed, torch.float32)
        assert relative_error(found, x.double() @ weight.float().bfloat16().double().T) < EXACT


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Tokens as 8-bit steps times their scales, float64."""
    steps, scale, _ = quantize(x.float(), "int8")
    return steps.double() * dequantize(torch.ones_like(steps), scale).double()


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n", "k", "columns"), [(64, 128, 4), (1, 1, 1), (40, 190, 0), (97, 577, 7), (33, 1100, 3)])
def test_eight_bit_tokens_meet_exact_integers(
    n: int, k: int, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, weight = random_packed(n, k, dtype=dtype, shadow=random_shadow(n, k, [columns], int8=columns == 4))
    poison(monkeypatch)
    for tokens in (1, 2, 9, 12, 13, 25, 257):
        x = random_tokens(tokens, k, dtype)
        expected = rounded(x) @ weight.T
        assert relative_error(native.linear_int8(x, packed, torch.float32), expected) < EXACT
        assert relative_error(native.linear_int8(x, packed, dtype), expected) < BF16


@needs_native
def test_the_largest_integers_do_not_saturate() -> None:
    x = torch.full((3, 128), 127.0)
    x[1] = -127
    x[2, ::2] = -127
    for code, zero in ((15, 0), (0, 15)):
        codes = torch.full((32, 128), code, dtype=torch.uint8)
        packed = from_codes(codes, torch.ones(32, 2), torch.full((32, 2), zero, dtype=torch.uint8))
        assert torch.equal(native.linear_int8(x, packed, torch.float32)[:, 0], x.sum(1) * (code - zero))


@needs_native
def test_a_token_rounded_to_eight_bits_does_not_depend_on_the_others() -> None:
    packed, _ = random_packed(100, 320, dtype=torch.bfloat16, shadow=random_shadow(100, 320, [4]))
    x = random_tokens(40, 320, torch.bfloat16)
    x[3] *= 1e4
    x[5] = 0
    together = native.linear_int8(x, packed, torch.float32)
    assert torch.equal(together[5], torch.zeros(100))
    for t in (0, 3, 4, 39):
        assert torch.equal(native.linear_int8(x[t : t + 1], packed, torch.float32)[0], together[t])
    x[7, 70] = torch.nan
    poisoned = native.linear_int8(x, packed, torch.float32)
    assert bool(poisoned[7].isnan().all()) and torch.equal(poisoned[8:], together[8:])


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_with_eight_bit_tokens_equal_a_loop_over_tokens(dtype: torch.dtype) -> None:
    gate_up, weight_gate_up = random_packed(160, 136, 6, shadow=random_shadow(160, 136, [2, 0, 1, 9, 0, 3]))
    down, weight_down = random_packed(136, 80, 6, seed=1, shadow=random_shadow(136, 80, [0, 3, 0, 1, 0, 2]))
    for tokens in (1, 3, 64, 300):
        index, weight = random_routing(tokens, 6, 2)
        index[index == 2] = 6  # nobody chooses the third
        index[:, 1] = torch.where(index[:, 1] == 4, 6, index[:, 1])
        index[0] = torch.tensor([4, 6])  # at least one token for the fifth
        x = random_tokens(tokens, 136, dtype)
        found = native.experts(x, index, weight, gate_up, down, int8=True)
        expected = experts_float64(x, index, weight, weight_gate_up, weight_down)
        assert found.dtype == dtype and relative_error(found, expected) < 2e-2
        alone = [native.experts(x[t, None], index[t, None], weight[t, None], gate_up, down, int8=True) for t in (0, -1)]
        assert torch.equal(torch.cat(alone), found[[0, -1]])


@needs_native
@pytest.mark.parametrize("tokens", [1, 7, 10, 16, 40])
def test_any_number_of_threads_gives_the_same_bits(tokens: int) -> None:
    packed, _ = random_packed(500, 192, dtype=torch.bfloat16, shadow=random_shadow(500, 192, [4]))
    x = random_tokens(tokens, 192, torch.bfloat16)
    for product in (native.linear, native.linear_int8):
        alone = product(x, packed, torch.bfloat16)
        try:
            torch.set_num_threads(3)
            together = product(x, packed, torch.bfloat16)
        finally:
            torch.set_num_threads(1)
        assert torch.equal(alone, together)


@needs_native
@pytest.mark.parametrize("tokens", [1, 8, 9, 33])
def test_rows_of_a_larger_tensor_and_columns_of_another_do_not_leak_in(tokens: int) -> None:
    packed, weight = random_packed(33, 100, dtype=torch.bfloat16)
    around = torch.full((tokens, 300), torch.nan, dtype=torch.bfloat16)
    around[:, 100:200] = random_tokens(tokens, 100, torch.bfloat16)
    found = linear(around[:, 100:200], packed, backend="cpu")
    assert relative_error(found, around[:, 100:200].double() @ weight.T) < BF16
    found = linear(around[:, 100:200], replace(packed, resident="int8"), backend="cpu")
    assert relative_error(found, rounded(around[:, 100:200]) @ weight.T) < BF16


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_in_one_call_equal_a_loop_over_tokens(dtype: torch.dtype) -> None:
    gate_up, weight_gate_up = random_packed(
        2 * 80, 136, 6, dtype=dtype, shadow=random_shadow(160, 136, [2, 0, 1, 9, 0, 3])
    )
    down, weight_down = random_packed(136, 80, 6, seed=1, dtype=dtype)
    for tokens in (1, 3, 64):
        index, weight = random_routing(tokens, 6, 2)
        index[0] = 6
        x = random_tokens(tokens, 136, torch.bfloat16)
        found = experts(x, index, weight, gate_up, down, backend="cpu")
        expected = experts_float64(x, index, weight, weight_gate_up, weight_down)
        assert torch.equal(found[0], torch.zeros(136, dtype=torch.bfloat16))
        if tokens > 1:
            assert relative_error(found, expected) < BF16


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (64, 128), (33, 190), (97, 577)])
def test_eight_bit_codes_and_plain_bf16_weights(n: int, k: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8, generator=generator)
    scale = torch.rand(n, -(-k // 64), generator=generator).add_(0.5).mul_(1e-3).to(dtype)
    weight = (codes.double() - 128) * scale.double()[:, torch.arange(k) // 64]
    for tokens in (1, 4, 5, 8, 9, 40):
        x = random_tokens(tokens, k, torch.bfloat16)
        found = native.eight(x, codes, scale, torch.float32)
        assert relative_error(found, x.double() @ weight.T) < (EXACT if tokens <= native.EXACT_ROWS else 2 * BF16)
        found = native.dense(x, weight.bfloat16())
        assert relative_error(found, x.double() @ weight.bfloat16().double().T) < BF16
    with pytest.raises(ValueError, match="one scale for 64"):
        native.eight(x, codes, scale[:, :0], torch.float32)


@pytest.mark.parametrize("there", [True, False])
def test_an_eight_bit_head_is_the_same_with_and_without_the_kernels(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not there:
        monkeypatch.setattr(native, "suits", lambda tokens: False)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (97, 190), dtype=torch.uint8, generator=generator)
    scale = torch.rand(97, 3, generator=generator).add_(0.5).mul_(1e-3).bfloat16()
    weight = (codes.double() - 128) * scale.double()[:, torch.arange(190) // 64]
    numeric = random_tokens(2, 190, torch.bfloat16, seed=5)
    weight[[3, 90]] = numeric.double()
    head = EightLinear(codes, scale, group_size=64, rows=(torch.tensor([3, 90]), numeric))
    x = random_tokens(6, 190, torch.bfloat16).reshape(2, 3, 190)
    out = head(x)
    assert out.shape == (2, 3, 97) and out.dtype == torch.bfloat16
    assert relative_error(out, x.double() @ weight.T) < BF16


@needs_native
def test_silu_is_right_from_minus_to_plus_infinity() -> None:
    codes = torch.zeros(1, 2, 64, dtype=torch.uint8)
    codes[0, 0, 0] = codes[0, 1, 1] = 1
    ones = torch.ones(1, 2, 1)
    gate_up = from_codes(codes, ones, torch.zeros(1, 2, 1, dtype=torch.uint8))
    down = from_codes(torch.ones(1, 64, 1, dtype=torch.uint8), torch.ones(1, 64, 1), torch.zeros(1, 64, 1).byte())
    gate = torch.tensor([-1e30, -90.0, -20.0, -1.5, -1e-3, 0.0, 1e-3, 0.7, 5.0, 88.0, 1e30]).bfloat16()
    x = torch.zeros(len(gate), 64, dtype=torch.bfloat16)
    x[:, 0], x[:, 1] = gate, 1
    index, weight = torch.zeros(len(gate), 1, dtype=torch.long), torch.ones(len(gate), 1)
    found = native.experts(x, index, weight, gate_up, down)[:, 0].double()
    expected = gate.double() * torch.sigmoid(gate.double())
    assert torch.allclose(found, expected, rtol=8e-3, atol=1e-30)


@needs_native
def test_what_does_not_fit_is_said() -> None:
    packed, _ = random_packed(64, 64, 2)
    down, _ = random_packed(64, 32, 2)
    x, weight = torch.ones(1, 64).bfloat16(), torch.ones(1, 1)
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match=rf"expert indices are {wrong}\.\.{wrong}, outside 0\.\.2"):
            native.experts(x, torch.tensor([[wrong]]), weight, packed, down)
    single, _ = random_packed(8, 64)
    single.zero[0, 0] = 16
    with pytest.raises(ValueError, match=r"zero-points must be 0\.\.15, found 16"):
        native.linear(x, single, torch.float32)


def test_without_a_compiler_pytorch_computes(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert native.library() is None and not native.suits(1)
    packed, weight = random_packed(96, 128, dtype=torch.bfloat16)
    x = random_tokens(3, 128, torch.bfloat16)
    assert relative_error(linear(x, packed, backend="cpu"), x.double() @ weight.T) < BF16
    assert "native" not in packed.forms


def test_the_kernels_can_be_turned_off(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLM5_QUANT_NATIVE", "0")
    assert native.library() is None


@needs_native
def test_a_compiler_that_fails_is_reported_and_leaves_nothing(
    fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho no such target >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert native.library() is None
    assert "no such target" in caplog.text
    assert list((tmp_path / "glm5-quant").iterdir()) == []


@needs_native
@pytest.mark.slow
def test_the_library_is_compiled_once_into_a_private_folder(
    fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.library() is not None
    made = list((tmp_path / "glm5-quant").iterdir())
    assert len(made) == 1 and (tmp_path / "glm5-quant").stat().st_mode & 0o077 == 0
    before = made[0].stat().st_mtime_ns
    native.library.cache_clear()
    assert native.library() is not None
    assert [path.stat().st_mtime_ns for path in (tmp_path / "glm5-quant").iterdir()] == [before]


@needs_native
@pytest.mark.parametrize("size", [0, 20, 5000, -1])
def test_a_library_that_was_cut_off_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int) -> None:
    compiler = tmp_path / "cc"  # the last word is the name of the file to make
    compiler.write_text('#!/bin/sh\nfor last; do :; done\nhead -c 9000 /dev/zero > "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = native._compiled()
    content = made.read_bytes()
    made.write_bytes(content[:size])
    assert native._compiled() == made and made.read_bytes() == content
    compiler.unlink()
    assert native._compiled() == made  # whole now, so nothing is compiled


@needs_native
def test_another_c_library_gets_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native.subprocess, "run", lambda command, **_: Path(command[-1]).write_bytes(b"made"))
    here = native._compiled()
    monkeypatch.setattr(native.platform, "libc_ver", lambda: ("glibc", "2.17"))
    assert native._compiled() != here and len(list(here.parent.iterdir())) == 2


@needs_native
def test_a_cache_that_others_can_write_to_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "glm5-quant").mkdir()
    (tmp_path / "glm5-quant").chmod(0o777)
    elsewhere = native._cache()
    assert elsewhere.parent != tmp_path and elsewhere.stat().st_uid == os.getuid()
    elsewhere.rmdir()


@needs_native
def test_threads_that_end_take_their_memory_along() -> None:
    packed, _ = random_packed(512, 4096, dtype=torch.bfloat16)
    x = random_tokens(256, 4096, torch.bfloat16)

    def run(count: int) -> int:
        for _ in range(count):
            thread = threading.Thread(target=native.linear, args=(x, packed, torch.float32))
            thread.start()
            thread.join()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = run(5)
    assert run(40) - before < 40 * 2**20  # 2 MiB each, if they did not


@needs_native
def test_a_layer_gives_the_memory_of_many_tokens_back() -> None:
    gate_up, down = random_packed(32, 4096, 1)[0], random_packed(4096, 16, 1)[0]
    index, weight = torch.zeros(8192, 1, dtype=torch.long), torch.ones(8192, 1)

    def run(tokens: int) -> int:
        native.experts(torch.ones(tokens, 4096).bfloat16(), index[:tokens], weight[:tokens], gate_up, down)
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = run(64)
    assert run(8192) - before < 120 * 2**20  # 320 MiB were at work


@needs_native
def test_a_compiler_may_be_named_by_more_than_one_word(
    fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    note = tmp_path / "note"
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\necho "$@" > {note}\nexit 1\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CC", f"{wrapper} gcc -m64")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.library() is None
    assert note.read_text().startswith("gcc -m64 -O3 ")


@needs_native
def test_a_temporary_cache_goes_with_the_process(tmp_path: Path) -> None:
    code = "from glm5_quant.kernels import native; print(native._cache())"
    settings = {"HOME": "/proc/none", "XDG_CACHE_HOME": "", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | settings, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()).parent == tmp_path
    assert list(tmp_path.iterdir()) == []
