from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, LlamaConfig

from glm5_quant.eval.kv_cache import CacheSpec, cache_use, new_cache, pack_fp8, pack_int4, spec_of, unpack

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


def test_recent_tokens_stay_as_they_are_and_older_ones_are_quantized() -> None:
    keys = states(40)
    cache = new_cache(CONFIG, CacheSpec(kind="fp8", recent=10))
    feed(cache, keys[:, :, :39], 13)
    found, values = cache.update(keys[:, :, 39:], 2 * keys[:, :, 39:], 0)
    assert found.shape == keys.shape and cache.get_seq_length() == 40
    assert torch.equal(found[:, :, 29:], keys[:, :, 29:])
    assert torch.equal(found[:, :, :29], unpack(pack_fp8(keys[:, :, :29]), torch.float32))
    assert torch.equal(values[:, :, 29:], 2 * keys[:, :, 29:])


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
    assert use.host_bytes > 0 and use.bytes_16bit == 2 * 2 * 2 * 64 * (65 + 64)


@pytest.mark.parametrize(("kind", "most"), [("fp8", 0.54), ("int4", 0.29)])
def test_bytes_are_those_of_the_codes_and_scales(kind: str, most: float) -> None:
    cache = new_cache(CONFIG, CacheSpec(kind=kind))
    feed(cache, states(50, 64), 10)
    use = cache_use(cache)
    assert use.device_bytes < most * use.bytes_16bit


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
