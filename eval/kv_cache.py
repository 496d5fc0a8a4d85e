"""Key/value caches that keep older tokens in fewer bits: FP8, INT4, or tiers with the oldest in host memory.

Shapes: keys and values are [B, H, T, D] (batch, heads, tokens, head size). As in a server, a token's key and value are
written first and read from the cache then, by the token itself too: the newest `recent` tokens, the reading one among
them, are in 16 bit, all others quantized. FP8 is E4M3 with one float32 scale a token and head, from its absolute
maximum; INT4 is asymmetric with scale and minimum per 64 head channels (as in KIVI, arXiv 2402.02750, but per token for
keys too).

A step of several tokens gives all of them the same keys. Without a 16-bit tier that is what each would see by itself.
With one, what leaves it at the end of the step is quantized for the step's first tokens as well, so steps are kept to
`CacheSpec.step` tokens, and a token sees from `recent` - `step` + 1 to `recent` tokens in 16 bit.

Error feedback (optional): before a token is quantized, `gain` times what was carried on from the token before it (in
the same head and channel) is added; what quantizing then misses is carried on. Read over many tokens the errors of
neighbours cancel, as in sigma-delta conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
HALF_MAX = 65504.0
INT4_GROUP = 64


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """What an older token is kept as.

    kind: "fp8", "int4" or "tiered" (FP8, oldest on the host). recent: newest tokens kept in the model's dtype.
    on_device: quantized tokens kept on the device before the oldest move to host memory ("tiered" only).
    feedback: gain of error feedback between tokens. static_scales: fixed FP8 scales (key, value) by layer, as a
    calibrated checkpoint brings them; None takes them from each token.
    """

    kind: str
    recent: int = 0
    on_device: int = 32768
    feedback: float = 0.0
    static_scales: Mapping[int, tuple[float, float]] | None = None

    @property
    def step(self) -> int | None:
        """Tokens to be read at once at most: an eighth of the 16-bit tier, or any number where there is none."""
        return max(1, self.recent // 8) if self.recent else None


def spec_of(kind: str, feedback: float = 0.0, recent: int | None = None) -> CacheSpec | None:
    """The cache named by `--kv-cache`; None for "fp16". "tiered" keeps the last 4,096 tokens in 16 bit."""
    if kind == "fp16":
        return None
    default = 4096 if kind == "tiered" else 0
    return CacheSpec(kind=kind, recent=default if recent is None else recent, feedback=feedback)


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Quantized tokens: codes, and scales that bring them back. FP8: codes [B, H, T, D], scale [B, H, T, 1].
    INT4: two codes a byte, codes uint8 [B, H, T, D/2], scale and low [B, H, T, G]."""

    codes: Tensor
    scale: Tensor
    low: Tensor | None
    width: int

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return self.codes.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scale.nbytes + (0 if self.low is None else self.low.nbytes)

    def to(self, device: torch.device) -> Packed:
        """The same on another device."""
        low = None if self.low is None else self.low.to(device)
        return Packed(codes=self.codes.to(device), scale=self.scale.to(device), low=low, width=self.width)

    def slice(self, start: int, stop: int | None) -> Packed:
        """Tokens start to stop."""
        low = None if self.low is None else self.low[:, :, start:stop]
        codes, scale = self.codes[:, :, start:stop], self.scale[:, :, start:stop]
        return Packed(codes=codes, scale=scale, low=low, width=self.width)

    def join(self, *others: Packed) -> Packed:
        """Tokens of all, in order."""
        parts = (self, *others)
        lows = [part.low for part in parts if part.low is not None]
        # Bytes are joined, since concatenation of FP8 is not there on every device.
        codes = torch.cat([part.codes.view(torch.uint8) for part in parts], dim=2).view(self.codes.dtype)
        scale = torch.cat([part.scale for part in parts], dim=2)
        return Packed(codes=codes, scale=scale, low=torch.cat(lows, dim=2) if lows else None, width=self.width)


def pack_fp8(values: Tensor, static_scale: float | None = None) -> Packed:
    """float [B, H, T, D] to E4M3, saturating; all-zero tokens get scale 1."""
    wide = values.float()
    if static_scale is None:
        scale = wide.abs().amax(-1, keepdim=True) / FP8_MAX
        scale = torch.where(scale > 0, scale, 1.0)
    else:
        scale = torch.full_like(wide[..., :1], static_scale)
    codes = (wide / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return Packed(codes=codes, scale=scale, low=None, width=values.shape[-1])


def pack_int4(values: Tensor) -> Packed:
    """float [B, H, T, D] to codes 0..15 by groups of 64 channels (fewer where the head is smaller), D even.

    Scale and minimum are kept in float16, and codes are chosen for what they round to; a last group may be shorter.
    """
    wide = values.float()
    width = wide.shape[-1]
    group = min(INT4_GROUP, width)
    padded = torch.nn.functional.pad(wide, (0, -width % group), mode="constant")
    if padded.shape[-1] != width:
        padded[..., width:] = wide[..., -1:]  # repeats a value, so the range of the last group stays its own
    groups = padded.reshape(*padded.shape[:-1], -1, group)
    low = groups.amin(-1).clamp(-HALF_MAX, HALF_MAX).half()
    scale = ((groups.amax(-1) - low.float()) / 15).clamp(0, HALF_MAX).half()
    scale = torch.where(scale > 0, scale, 1.0)
    codes = ((groups - low.float()[..., None]) / scale.float()[..., None]).round().clamp(0, 15).to(torch.uint8)
    flat = codes.flatten(-2)
    return Packed(codes=flat[..., 0::2] | flat[..., 1::2] << 4, scale=scale, low=low, width=width)


def unpack(packed: Packed, dtype: torch.dtype) -> Tensor:
    """Back to [B, H, T, D] in `dtype`."""
    if packed.low is None:
        return (packed.codes.float() * packed.scale).to(dtype)
    codes = torch.stack([packed.codes & 15, packed.codes >> 4], dim=-1)
    groups = codes.reshape(*packed.scale.shape, -1)
    wide = groups.float() * packed.scale.float()[..., None] + packed.low.float()[..., None]
    return wide.flatten(-2)[..., : packed.width].to(dtype)


@dataclass
class Side:
    """The older keys, or values, of one layer: quantized tokens on device and host, and what they lost.

    `carried` [B, H, 1, D] is the error carried on to the next token; `lost` and `total` are sums of squares.
    """

    spec: CacheSpec
    static_scale: float | None = None
    host: Packed | None = None
    device: Packed | None = None
    carried: Tensor | None = None
    lost: float = 0.0
    total: float = 0.0

    @property
    def tokens(self) -> int:
        """Quantized tokens."""
        return sum(part.tokens for part in (self.host, self.device) if part is not None)

    def push(self, values: Tensor) -> None:
        """Quantize tokens [B, H, T, D] behind those already here."""
        packed = self._with_feedback(values) if self.spec.feedback else self._pack(values)
        wide = values.float()
        self.lost += float((unpack(packed, torch.float32) - wide).square().sum())
        self.total += float(wide.square().sum())
        self.device = packed if self.device is None else self.device.join(packed)
        extra = self.device.tokens - self.spec.on_device
        if self.spec.kind == "tiered" and extra > 0:
            oldest = self.device.slice(0, extra).to(torch.device("cpu"))
            self.host = oldest if self.host is None else self.host.join(oldest)
            self.device = self.device.slice(extra, None)

    def read(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Dequantized tokens in order, as a list of parts."""
        return [unpack(part.to(device), dtype) for part in (self.host, self.device) if part is not None]

    def _pack(self, values: Tensor) -> Packed:
        return pack_int4(values) if self.spec.kind == "int4" else pack_fp8(values, self.static_scale)

    def _with_feedback(self, values: Tensor) -> Packed:
        made = []
        for token in torch.split(values.float(), 1, dim=2):
            wanted = token if self.carried is None else token + self.spec.feedback * self.carried
            made.append(self._pack(wanted))
            self.carried = wanted - unpack(made[-1], torch.float32)
        return made[0].join(*made[1:])


class TierMixin:
    """Turns a growing transformers cache layer into one with an older, quantized part.

    `keys` and `values` of the parent hold only the recent tokens.
    """

    sides: tuple[Side, Side]
    recent: int

    def set_tiers(self, spec: CacheSpec, layer: int) -> None:
        """Start empty."""
        scales = (None, None) if spec.static_scales is None else spec.static_scales[layer]
        self.sides = (Side(spec, scales[0]), Side(spec, scales[1]))
        self.recent = spec.recent

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append tokens; return all keys and values as they are kept, the new ones too."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]
        extra = keys.shape[2] - self.recent
        if extra > 0:
            for side, states in zip(self.sides, (keys, values), strict=True):
                side.push(states[:, :, :extra])
            self.keys, self.values = keys[:, :, extra:].contiguous(), values[:, :, extra:].contiguous()
        older = [side.read(key_states.dtype, key_states.device) for side in self.sides]
        return torch.cat([*older[0], self.keys], dim=2), torch.cat([*older[1], self.values], dim=2)

    def get_seq_length(self) -> int:
        """Tokens held in all tiers."""
        return int(super().get_seq_length()) + self.sides[0].tokens  # type: ignore[misc]


class TieredLayer(TierMixin, DynamicLayer):  # type: ignore[misc]
    """Plain attention."""


class TieredIndexedLayer(TierMixin, DynamicIndexedLayer):  # type: ignore[misc]
    """Sparse attention with an indexer, whose own keys stay as they are."""


@dataclass
class CacheUse:
    """What a quantized cache held and lost, by layer, over one dialogue."""

    key_error: list[float] = field(default_factory=list)
    value_error: list[float] = field(default_factory=list)
    device_bytes: int = 0
    host_bytes: int = 0
    bytes_16bit: int = 0


def new_cache(config: Any, spec: CacheSpec | None) -> DynamicCache:
    """A transformers cache for a model config; with a spec its full-attention layers keep older tokens quantized."""
    cache = DynamicCache(config=config)
    if spec is None:
        return cache
    kinds = {DynamicLayer: TieredLayer, DynamicIndexedLayer: TieredIndexedLayer}
    for number, layer in enumerate(cache.layers):
        if type(layer) in kinds:
            tiered = kinds[type(layer)]()
            tiered.set_tiers(spec, number)
            cache.layers[number] = tiered
    return cache


def untouched(cache: Any) -> int:
    """Layers of a cache that no spec quantizes: those of sliding windows, which forget older tokens anyway."""
    return sum(not isinstance(layer, TierMixin) for layer in getattr(cache, "layers", ()))


def cache_use(cache: Any) -> CacheUse | None:
    """Errors and sizes of a cache made by `new_cache`, or None where nothing is quantized."""
    layers = [layer for layer in getattr(cache, "layers", []) if isinstance(layer, TierMixin)]
    if not layers:
        return None
    use = CacheUse()
    for layer in layers:
        keys, values = layer.sides
        use.key_error.append(_relative(keys))
        use.value_error.append(_relative(values))
        for side, recent in ((keys, layer.keys), (values, layer.values)):
            size = 0 if recent is None else recent.nbytes
            use.device_bytes += size + (side.device.nbytes if side.device is not None else 0)
            use.host_bytes += side.host.nbytes if side.host is not None else 0
            use.bytes_16bit += 0 if recent is None else 2 * recent.numel()
            for part in (side.host, side.device):
                if part is not None:
                    use.bytes_16bit += 2 * part.codes.shape[0] * part.codes.shape[1] * part.tokens * part.width
    return use


def _relative(side: Side) -> float:
    return (side.lost / side.total) ** 0.5 if side.total else 0.0
