"""Settings of an evaluation, checked where they are made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from glm5_quant.model.errors import UserError

KV_CACHES = ("fp16", "fp8", "int4", "tiered")
SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """How to evaluate.

    window, stride: tokens a window, and new tokens per window (None: as many as leave one token of context).
    num_windows: stop after so many (None: the whole text).
    batch_size, padding_side: windows run together, and where padding goes; neither changes a figure.
    prefix: "auto" (BOS, `[gMASK]<sop>`, what the tokenizer puts) or "none".
    long_dialogue: turns of the drift measurement (None: off).
    num_dialogues: how many dialogues at most.
    free_running: models also answer by themselves.
    max_new_tokens: longest answer then.
    num_problems, max_answer_tokens: of numeric tasks, and how long an answer there may be.
    decode_steps: feed dialogues one token at a time, as serving does, instead of by chunks of `chunk`. Slow, and the
        same figures but for a quantized cache with `kv_recent`.
    together: models that read a chunk of a dialogue at the same time, each with torch's own number of threads (one
        core each with OMP_NUM_THREADS=1). Models that read with several caches take turns. No figure depends on it.
    max_context: tokens of context in dialogues; where a dialogue is longer the oldest turns are dropped (None: the
        model's max_position_embeddings).
    kv_cache: "fp16", or "fp8", "int4" or "tiered": source and exports read dialogues with such a cache too.
        kv_feedback: share of the cache's error carried on to the next token (0 to 1; above 0 the same caches are read
        with and without). kv_recent: newest tokens kept in 16 bit (None: 4,096 for "tiered", else none).
        kv_scales: JSON file with fixed FP8 scales by layer, {"0": [key, value], ...} ("": from each token).
    critical_words: file with one word a line, "default", or "" for none.
    stress: add the four stress shapes.
    diagnose: windows on which layers, routers and the head are compared part by part (0: off), and the source is
        compared with itself at another batch size.
    gates: conditions such as "kl<0.05,numeric<0.5%".
    margin: nats per token within which "no drift" may be claimed.
    draws, seed: of the bootstrap and of everything random.
    device, dtype: where and in what the models run ("auto": float32 on a CPU, the model's own dtype elsewhere).
    source_cache: folder that keeps the source's top_k answers.
    sequential: hold one model at a time (needs or makes a source cache).
    """

    window: int = 512
    stride: int | None = None
    num_windows: int | None = None
    batch_size: int = 1
    padding_side: str = "right"
    prefix: str = "auto"
    long_dialogue: int | None = None
    num_dialogues: int = 8
    free_running: bool = False
    max_new_tokens: int = 48
    max_answer_tokens: int = 256
    num_problems: int = 50
    decode_steps: bool = False
    chunk: int = 512
    together: int = 1
    max_context: int | None = None
    kv_cache: str = "fp16"
    kv_feedback: float = 0.0
    kv_recent: int | None = None
    kv_scales: str = ""
    critical_words: str = ""
    stress: bool = False
    diagnose: int = 2
    gates: str = ""
    margin: float = 0.01
    draws: int = 2000
    seed: int = 0
    device: str = "cpu"
    dtype: str = "auto"
    source_cache: str = ""
    top_k: int = 256
    sequential: bool = False

    def __post_init__(self) -> None:
        _at_least("window", self.window, 2)
        for name in (
            "batch_size",
            "num_dialogues",
            "max_new_tokens",
            "max_answer_tokens",
            "chunk",
            "together",
            "draws",
            "top_k",
            "num_problems",
        ):
            _at_least(name, getattr(self, name), 1)
        for name in ("stride", "num_windows", "long_dialogue", "max_context"):
            value = getattr(self, name)
            if value is not None:
                _at_least(name, value, 1)
        for name in ("diagnose", "seed"):
            _at_least(name, getattr(self, name), 0)
        if self.kv_recent is not None:
            _at_least("kv_recent", self.kv_recent, 0)
        _one_of("padding_side", self.padding_side, ("left", "right"))
        _one_of("prefix", self.prefix, ("auto", "none"))
        _one_of("kv_cache", self.kv_cache, KV_CACHES)
        if self.kv_scales and self.kv_cache not in ("fp8", "tiered"):
            raise UserError("only FP8 caches have scales", item="kv_scales", found=f"kv_cache={self.kv_cache}")
        _one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        if not 0 <= self.kv_feedback <= 1:
            raise UserError("out of range", item="kv_feedback", found=self.kv_feedback, expected="0 to 1")
        if self.kv_cache == "fp16" and (self.kv_feedback or self.kv_recent is not None):
            item = "kv_feedback" if self.kv_feedback else "kv_recent"
            raise UserError("no quantized KV cache to use it", item=item, found="kv_cache=fp16")
        if not self.margin > 0:
            raise UserError("must be positive", item="margin", found=self.margin, expected="nats per token above 0")


def parse_settings(pairs: Iterable[str]) -> dict[str, object]:
    """Settings from texts "name=value", or "name" alone for a switch; "none" takes back a number that may be left out.

    The values are checked by `EvalConfig`. Raises UserError for a name it does not have or a value of another kind.
    """
    kinds = {found.name: str(found.type) for found in fields(EvalConfig)}
    chosen: dict[str, object] = {}
    for pair in pairs:
        name, given, text = (part.strip() for part in pair.partition("="))
        name = name.replace("-", "_")
        if name not in kinds:
            raise UserError("no such setting", item=name, expected=", ".join(sorted(kinds)))
        chosen[name] = _value(name, kinds[name], text if given else "on" if kinds[name] == "bool" else None)
    return chosen


def _value(name: str, kind: str, text: str | None) -> object:
    problem = UserError(
        "not a value of this setting", item=name, found=text, expected=kind.replace("bool", "on or off")
    )
    if text is None:
        raise problem
    if kind.endswith("None") and text.lower() == "none":
        return None
    try:
        if kind == "bool":
            return SWITCH[text.lower()]
        return int(text) if kind.startswith("int") else float(text) if kind == "float" else text
    except (KeyError, ValueError):
        raise problem from None


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UserError("out of range", item=name, found=value, expected=f"{least} or more")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError("unknown value", item=name, found=value, expected=" or ".join(allowed))
