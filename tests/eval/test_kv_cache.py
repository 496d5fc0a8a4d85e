from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support_models import byte_tokenizer, tiny_q3
from transformers import DynamicCache, LlamaConfig

from glm5_quant.eval import evaluate
from glm5_quant.eval.drift import Reader
from glm5_quant.eval.kv_cache import CacheSpec, cache_use, new_cache, pack_fp8, pack_int4, spec_of, unpack
from glm5_quant.eval.runner import PlainCache, Runner
from glm5_quant.model.loading import load
from glm5_quant.model.texts import load_tokenizer

CONFIG = LlamaConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=2, num_key_value_heads=2, vocab_size=32)


def states(tokens: int, width: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(1, 2, tokens, width, generator=torch.Generator().manual_seed(seed))


def feed(cache: DynamicCache, keys: torch.Tensor, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    out = None
    for part in keys.split(chunk, dim=2):
        for layer in range(2):
            out = cache.update(part, 2 * part, layer)
    assert out is not None
    return out


def test_fp8_keeps_each_token_within_its_step_and_zero_exactly() -> None:
    values = states(5) * torch.tensor([1e-4, 1.0, 50.0, 1e4, 0.0])[:, None]
    found = unpack(pack_fp8(values), torch.float32)
    largest = values.abs().amax(-1, keepdim=True)
    assert ((found - values).abs() <= values.abs() / 16 + largest / 448 / 64 + 1e-12).all()
    assert (found[:, :, 4] == 0).all()
    exact = torch.tensor([[[[448.0, -448.0, 16.0, 0.5]]]])
    assert torch.equal(unpack(pack_fp8(exact), torch.float32), exact)


@pytest.mark.parametrize("width", [64, 128, 96, 16])
def test_int4_keeps_each_value_within_half_a_step_whatever_the_head_size(width: int) -> None:
    values = states(7, width)
    packed = pack_int4(values)
    found = unpack(packed, torch.float32)
    assert found.shape == values.shape
    for start in range(0, width, 64):
        part = slice(start, min(start + 64, width))
        step = (values[..., part].amax(-1) - values[..., part].amin(-1)) / 15
        assert ((found - values)[..., part].abs() <= step[..., None] * 0.51 + 0.003).all()
    codes = torch.tensor([[[[float(i % 16) for i in range(64)]]]])
    assert torch.equal(unpack(pack_int4(codes), torch.float32), codes)


def test_tokens_far_from_zero_keep_their_range() -> None:
    below = torch.tensor([[[[-448.0, -16.0, 2.0, 1.0]]]])
    assert torch.equal(unpack(pack_fp8(below), torch.float32), below)
    # The shorter last group of 96 channels has the range of its own 32 values, not that of a padding of zeros.
    ramp = 10 + torch.arange(96.0) / 95
    assert (unpack(pack_int4(ramp.view(1, 1, 1, 96)), torch.float32) - ramp).abs().max() <= 0.5 / 15 + 0.01
    beyond_half = torch.tensor([[[[1e5, 2e5] * 32]]])
    assert torch.allclose(unpack(pack_int4(beyond_half), torch.float32), beyond_half, rtol=0.02)


def test_recent_tokens_stay_as_they_are_and_older_ones_are_quantized() -> None:
    keys = states(40)
    cache = new_cache(CONFIG, CacheSpec(kind="fp8", recent=10))
    feed(cache, keys[:, :, :39], 13)
    found, values = cache.update(keys[:, :, 39:], 2 * keys[:, :, 39:], 0)
    assert found.shape == keys.shape and cache.get_seq_length() == 40
    assert torch.equal(found[:, :, 30:], keys[:, :, 30:])
    assert torch.equal(found[:, :, :30], unpack(pack_fp8(keys[:, :, :30]), torch.float32))
    assert torch.equal(values[:, :, 30:], 2 * keys[:, :, 30:])


@pytest.mark.parametrize("spec", [
    CacheSpec(kind="fp8"),
    CacheSpec(kind="fp8", static_scales={0: (0.01, 0.02), 1: (0.01, 0.02)}),
    CacheSpec(kind="int4"),
    CacheSpec(kind="int4", feedback=0.3),
    CacheSpec(kind="tiered", on_device=16),
])  # fmt: skip
@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_a_token_is_read_from_the_cache_as_it_is_kept_also_by_its_own_chunk(spec: CacheSpec, chunk: int) -> None:
    keys = states(40)
    by_token = feed(new_cache(CONFIG, spec), keys, 1)
    cache = new_cache(CONFIG, spec)
    for start, part in zip(range(0, 40, chunk), keys.split(chunk, dim=2), strict=True):
        found = [cache.update(part, 2 * part, layer) for layer in range(2)][1]
        for side, whole in zip(found, by_token, strict=True):
            assert torch.equal(side, whole[:, :, : start + chunk])
    assert bool((found[0] != keys).any(-1).all())
    assert cache.get_seq_length() == 40


@pytest.mark.parametrize(("recent", "step"), [(0, None), (1, 1), (8, 1), (64, 8), (4096, 512)])
def test_with_a_16_bit_tier_a_token_sees_all_of_it_but_for_the_rest_of_its_step(recent: int, step: int | None) -> None:
    spec = CacheSpec(kind="int4", recent=recent)
    assert spec.step == step
    if step is None or recent > 64:
        return
    keys = states(100)
    cache = new_cache(CONFIG, spec)
    for start in range(0, 100, step):
        part = keys[:, :, start : start + step]
        found, _ = cache.update(part, part, 0)
        kept = (found == keys[:, :, : found.shape[2]]).flatten(0, 1).all(-1).all(0)
        first = int(kept.int().argmax())
        assert bool(kept[first:].all())
        for place in range(start, min(start + step, 100)):
            assert min(recent - step + 1, place + 1) <= place + 1 - first <= recent


@pytest.mark.slow
def test_a_dialogue_costs_the_same_whether_it_is_read_in_chunks_or_token_by_token(tmp_path: Path) -> None:
    folder = byte_tokenizer(tiny_q3(tmp_path / "m"))
    # In float64 no code is on the other side of a half step for the order in which a chunk is summed.
    source = load(folder, dtype=torch.float32).double()
    source.set_experts_implementation("eager")
    talk = [{"messages": [{"role": r, "content": f"{r} {i} says"} for i in range(6) for r in ("user", "assistant")]}]
    settings: dict[str, Any] = {"dialogues": talk, "long_dialogue": 6, "tokenizer": load_tokenizer(folder)}
    settings |= {"diagnose": 0, "draws": 20}

    def measured(**more: Any) -> list[float]:
        found = evaluate(source, [], **settings, **more)
        return [variant.dialogue.slices[0].kl.value for variant in found.cache_variants]

    for asked in ({"kv_cache": "fp8"}, {"kv_cache": "int4", "kv_feedback": 0.3}):
        by_token, whole = measured(decode_steps=True, **asked), measured(**asked)
        assert whole == pytest.approx(by_token, rel=1e-5) and min(whole) > 0
        assert measured(chunk=7, **asked) == pytest.approx(by_token, rel=1e-5)
    by_token = measured(decode_steps=True, kv_cache="int4", kv_recent=32)
    assert measured(kv_cache="int4", kv_recent=32) == pytest.approx(by_token, rel=0.15)
    assert by_token[0] != pytest.approx(whole[0], rel=0.2)


def test_a_reader_with_few_tokens_at_once_gives_the_logits_that_were_asked_for() -> None:
    sizes = []

    def model(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.one_hot(ids.cumsum(1) % 97, 97).float()

    class Seen(Runner):
        def step(self, ids: torch.Tensor, cache: Any, keep: torch.Tensor | None = None) -> torch.Tensor:
            sizes.append(ids.shape[1])
            return super().step(ids, cache, keep)

    ids = torch.arange(1, 24)[None]
    one, few = (Reader(name="m", runner=Seen(model), new_cache=PlainCache, most=most) for most in (None, 5))
    for keep in (None, torch.tensor([0, 4, 5, 22]), torch.zeros(0, dtype=torch.int64)):
        assert torch.equal(one.step(ids, PlainCache(), keep), few.step(ids, PlainCache(), keep))
    assert sizes == [23, 5, 5, 5, 5, 3] * 3


def test_a_cache_whose_recent_part_holds_everything_equals_the_plain_one() -> None:
    keys = states(20)
    tiered = feed(new_cache(CONFIG, spec_of("tiered")), keys, 3)
    plain = feed(new_cache(CONFIG, spec_of("fp16")), keys, 3)
    assert torch.equal(tiered[0], plain[0]) and torch.equal(tiered[1], plain[1])
    assert cache_use(new_cache(CONFIG, None)) is None


def test_the_oldest_tokens_move_to_the_host_and_come_back_in_order() -> None:
    keys = states(64)
    cache = new_cache(CONFIG, CacheSpec(kind="tiered", recent=8, on_device=16))
    feed(cache, keys, 4)
    found, _ = cache.update(keys[:, :, :1], keys[:, :, :1], 0)
    side = cache.layers[0].sides[0]
    assert (side.host.tokens, side.device.tokens) == (64 + 1 - 8 - 16, 16)
    assert torch.equal(found[:, :, :56], unpack(pack_fp8(keys[:, :, :56]), torch.float32))
    use = cache_use(cache)
    # Two sides of two heads, 64 codes and a float32 scale; a layer of 65 tokens and one of 64.
    assert use.host_bytes == 2 * 2 * (64 + 4) * (65 + 64 - 2 * (8 + 16))
    assert use.bytes_16bit == 2 * 2 * 2 * 64 * (65 + 64)


@pytest.mark.parametrize(("kind", "token"), [("fp8", 64 + 4), ("int4", 32 + 2 + 2)])
def test_bytes_are_those_of_the_codes_and_scales_and_errors_relative_to_what_was_kept(kind: str, token: int) -> None:
    keys, cache = states(50, 64), new_cache(CONFIG, CacheSpec(kind=kind))
    found = feed(cache, keys, 10)
    use = cache_use(cache)
    assert (use.device_bytes, use.host_bytes) == (2 * 2 * 2 * 50 * token, 0)
    wanted = [
        float((side.double() - true).norm() / true.norm()) for side, true in zip(found, (keys, 2 * keys), strict=True)
    ]
    assert use.key_error == pytest.approx([wanted[0]] * 2, rel=1e-4) and wanted[0] > 0.01
    assert use.value_error == pytest.approx([wanted[1]] * 2, rel=1e-4)


def test_error_feedback_makes_errors_of_neighbours_cancel() -> None:
    keys = states(1).expand(-1, -1, 200, -1) + 0.01 * states(200, seed=1)
    means = {}
    for gain in (0.0, 0.3, 1.0):
        cache = new_cache(CONFIG, CacheSpec(kind="int4", feedback=gain))
        feed(cache, keys, 50)
        found, _ = cache.update(keys[:, :, :1], keys[:, :, :1], 0)
        means[gain] = float((found[:, :, :200] - keys).mean(2).square().mean() ** 0.5)
    assert means[1.0] < 0.1 * means[0.0]
    assert means[0.3] < means[0.0]
