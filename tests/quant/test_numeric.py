"""Numeric tokens: the rule on single texts, and on the real vocabularies against counts made another way."""

from __future__ import annotations

import gzip
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from support_paths import shared
from tokenizers import Tokenizer, decoders

from glm5_quant.quant.numeric import (
    NumericRule,
    describe,
    kind_of,
    numeric_positions,
    numeric_token_ids,
    numeric_token_kinds,
    token_weight,
)

EVERYTHING = NumericRule(chinese=True, mixed=True, marks=True)
TEXT = "On 12/05/2016 it rose 12.5% to $1,234.50 (up from 987); pi is 3.14159, and 007 pays €42."


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("7", "digits"),
        (" 2016", "digits"),
        ("0000", "digits"),
        ("1,000", "separated"),
        ("3.14", "separated"),
        (".5", "separated"),
        ("-12", "separated"),
        ("12:", "separated"),
        ("1\u202f000", "separated"),
        ("%", "percent"),
        (" 5%", "percent"),
        ("%).", "percent"),
        ("12.5 %", "percent"),
        ("％", "percent"),
        ("‰", "percent"),
        (" $", "currency"),
        ("($", "currency"),
        ("US$", "currency"),
        ("€5", "currency"),
        ("₹1,000", "currency"),
        ("２０", "full_width"),
        ("①", "circled"),
        ("⑴", "circled"),
        ("⒈", "circled"),
        ("❶", "circled"),
        ("⓫", "circled"),
        ("⓵", "circled"),
        ("⓿", "circled"),
        ("\U0001f10b", "circled"),
        ("۱۳", "scripts"),
        ("٣", "scripts"),
        ("৯", "scripts"),
        ("½", "fractions"),
        ("²", "fractions"),
        ("₁", "fractions"),
        ("Ⅱ", "roman"),
        ("二十", "chinese"),
        ("〇", "chinese"),
        ("2nd", "mixed"),
        ("x86", "mixed"),
        (".", "marks"),
    ],
)
def test_a_text_has_the_kind_it_should(text: str, kind: str) -> None:
    assert kind_of(text, EVERYTHING) == kind
    off = replace(EVERYTHING, **{kind: False})
    assert kind_of(text, off) is None


@pytest.mark.parametrize(
    "text",
    ["", " ", "\n", "the", "%s", "%d", "%%", "${", "$_", "$this", "II", "一般", "1\ufffd", "...", "--", "éa", "C"],
)
def test_words_code_and_broken_characters_are_not_numeric(text: str) -> None:
    assert kind_of(text, EVERYTHING) is None


@pytest.mark.parametrize("text", ["二十", "2nd", "."])
def test_opt_ins_are_off_by_default(text: str) -> None:
    assert kind_of(text) is None
    assert describe(NumericRule())["chinese"] is False


def test_special_tokens_are_never_numeric_and_ids_come_sorted() -> None:
    decoded = {9: "1", 4: "2", 7: "<0>", 5: "3"}
    assert numeric_token_ids(decoded, special_ids={5}) == [4, 9]
    assert numeric_token_kinds(["a", "1", "%"]) == {1: "digits", 2: "percent"}


def test_the_token_before_a_number_weighs_as_much_as_the_number() -> None:
    ids = torch.tensor([[5, 1, 5, 5], [1, 5, 5, 1]])
    mask = numeric_positions(ids, [1])
    assert mask.tolist() == [[True, True, False, False], [True, False, True, True]]
    weight = token_weight(torch.tensor([0.5, 0.5, 1.0]), torch.tensor([True, False, True]), 2, 4.0)
    assert weight.tolist() == [1.25, 0.25, 5.0]
    assert token_weight(torch.tensor([0.5]), torch.tensor([False]), 0, 4.0).tolist() == [1.0]


@cache
def vocabulary(name: str) -> tuple[Tokenizer, list[str], frozenset[int]]:
    path = shared(f"data/tokenizers/{name}/tokenizer.json.gz")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        tokenizer = Tokenizer.from_str(file.read())
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(tokenizer.get_vocab_size())]
    return tokenizer, texts, frozenset(tokenizer.get_added_tokens_decoder())


@cache
def default_kinds(name: str) -> dict[int, str]:
    _, texts, special = vocabulary(name)
    return numeric_token_kinds(texts, NumericRule(), special)


def count(texts: list[str], special: frozenset[int], pattern: str) -> int:
    return sum(i not in special and re.fullmatch(pattern, text) is not None for i, text in enumerate(texts))


@pytest.mark.parametrize(
    ("name", "digit_pieces"), [("smollm2", 10), ("qwen3", 10), ("deepseek_v4", 1110), ("olmoe", 2036)]
)
def test_every_digit_piece_of_a_real_vocabulary_is_found(name: str, digit_pieces: int) -> None:
    _, texts, special = vocabulary(name)
    kinds = default_kinds(name)
    assert count(texts, special, r"\s*[0-9]+\s*") == digit_pieces
    assert Counter(kinds.values())["digits"] == digit_pieces
    assert Counter(kinds.values())["fractions"] == count(
        texts, special, r"\s*[²³¹\u2070\u2074-\u2079\u2080-\u2089¼½¾]+\s*"
    )
    assert Counter(kinds.values())["full_width"] == count(texts, special, r"\s*[\uff10-\uff19]+\s*")


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "deepseek_v4", "olmoe"])
def test_percent_and_currency_signs_of_a_real_vocabulary_are_found_alone_and_with_a_space(name: str) -> None:
    _, texts, special = vocabulary(name)
    kinds = default_kinds(name)
    for i, text in enumerate(texts):
        bare = text.strip()
        if i not in special and len(bare) == 1 and (bare == "%" or unicodedata.category(bare) == "Sc"):
            assert kinds[i] in ("percent", "currency"), text
    assert not any(kinds.get(i) for i, text in enumerate(texts) if re.search(r"[a-z_{}<>\\]", text))


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "deepseek_v4", "olmoe"])
def test_decoding_never_loses_a_digit_and_every_digit_of_a_text_is_protected(name: str) -> None:
    tokenizer, texts, special = vocabulary(name)
    protected = set(default_kinds(name))
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT
    assert not protected & special
    assert all(i in protected for i in ids if re.search(r"[0-9%$€]", texts[i]))
    only_protected = "".join(re.findall(r"[0-9]", "".join(texts[i] for i in ids if i in protected)))
    assert only_protected == "".join(re.findall(r"[0-9]", TEXT))


def test_gpt2_free_merges_are_found() -> None:
    with gzip.open(shared("data/tokenizers/gpt2/vocab.json.gz"), "rt", encoding="utf-8") as file:
        vocabulary_ids: dict[str, int] = json.load(file)
    byte_level = decoders.ByteLevel()
    decoded = {i: byte_level.decode([token]) for token, i in vocabulary_ids.items()}
    kinds = numeric_token_kinds(decoded, NumericRule(), {vocabulary_ids["<|endoftext|>"]})
    independent = sum(bool(re.fullmatch("Ġ?[0-9]+", token)) for token in vocabulary_ids)
    assert Counter(kinds.values())["digits"] == independent
    assert independent > 1500
    assert kinds[vocabulary_ids["Ġ2016"]] == "digits"


def test_the_whole_numeric_list_of_glm_is_found_with_its_kinds() -> None:
    lines = shared("data/tokenizers/glm4_numeric_tokens.tsv").read_text(encoding="utf-8").rstrip("\n").split("\n")[1:]
    rows = [line.split("\t") for line in lines]
    decoded = {int(i): json.loads(text) for i, _, text in rows}
    kinds = numeric_token_kinds(decoded, EVERYTHING)
    assert len(kinds) == len(rows) == 683
    listed = Counter(kind for _, kind, _ in rows)
    found = Counter(kinds.values())
    assert found["digits"] == listed["ascii_digits"] + listed["mixed_ascii"] == 541
    # The list counts 〇 with the other numerals; here it is a Chinese one.
    assert found["chinese"] == listed["cjk_numeral"] + 1 == 88
    by_name: dict[str, Callable[[str], bool]] = {
        "full_width": lambda name: name.startswith("FULLWIDTH DIGIT"),
        "circled": lambda name: name.startswith("CIRCLED"),
        "roman": lambda name: name.startswith("ROMAN NUMERAL"),
        "scripts": lambda name: " DIGIT " in name and not name.startswith(("FULLWIDTH", "CIRCLED")),
        "fractions": lambda name: name.startswith(("SUPERSCRIPT", "SUBSCRIPT", "VULGAR")),
    }
    for kind, belongs in by_name.items():
        texts = [text.strip() for text in decoded.values()]
        assert found[kind] == sum(bool(t) and belongs(unicodedata.name(t[0], "")) for t in texts), kind
    assert len(numeric_token_ids(decoded)) == 683 - 88
