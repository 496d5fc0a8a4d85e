"""Trains the tokenizer of glm5-tiny: byte-level BPE, digits cut left to right in pieces of up to three, as GLM does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from glm5_quant.model.tiny.corpus import dialogues, texts

SPECIALS = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
MAX_VOCAB = 3072
# Han particles stand alone, and so do the short words before a value, space included: a name or an attribute is then
# the same token in a statement, a question and an answer, and a number never hangs on a lone space.
PATTERN = (
    r" (?:is|than|plus) (?=\S)|[的加为]|(?:(?![的加为])\p{Han})+| ?[A-Za-z]+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]|\s+| ?(?:(?!\p{Han})\p{L})+"
)

CHAT_TEMPLATE = """[gMASK]<sop>
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' + message['content'] -}}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""


def train(seed: int = 7, count: int = 1500) -> Tokenizer:
    """Train on `count` dialogues of 40 turns. Every digit piece 0..999 is guaranteed a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCAB,
        min_frequency=2,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    pieces = [f"{number:0{width}d}" for width in (1, 2, 3) for number in range(10**width)]
    sample = list(texts(dialogues(seed, count, 40)))
    tokenizer.train_from_iterator(sample + pieces * 50, trainer=trainer)
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    """What transformers reads beside tokenizer.json; a turn ends where the next role token begins."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 8192,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": list(SPECIALS[1:]),
        "clean_up_tokenization_spaces": False,
    }


def save(folder: Path, tokenizer: Tokenizer) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps(tokenizer_config(), indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
