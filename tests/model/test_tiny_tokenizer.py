"""The tokenizer of glm5-tiny: lossless, digits in pieces of up to three, a name the same token everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from glm5_quant.model import tiny
from glm5_quant.model.tiny import corpus, tokenizer
from glm5_quant.model.tiny.words import DOMAINS, NAMES


@pytest.fixture(scope="module")
def packaged() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny.folder())


def test_training_again_gives_the_packaged_file(tmp_path: Path) -> None:
    tokenizer.save(tmp_path, tokenizer.train())
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (tiny.folder() / name).read_bytes(), name


@pytest.mark.parametrize(
    "text",
    ["", "12.5%", "1234567", "上限是3500元。", "naïve café ☕ 🙂", "\n\t  x", "Привет, мир", "￥１２３", "a<|user|>b"],
)
def test_any_text_comes_back_whole(text: str, packaged: PreTrainedTokenizerBase) -> None:
    assert packaged.decode(packaged(text, add_special_tokens=False).input_ids) == text


def test_every_dialogue_comes_back_whole(packaged: PreTrainedTokenizerBase) -> None:
    for row in corpus.dialogues(77, 6, 60):
        text = packaged.apply_chat_template(row["messages"], tokenize=False)
        assert packaged.decode(packaged(text, add_special_tokens=False).input_ids) == text


def test_digits_are_cut_left_to_right_in_pieces_of_up_to_three(packaged: PreTrainedTokenizerBase) -> None:
    def pieces(text: str) -> list[str]:
        return [packaged.decode([i]) for i in packaged(text, add_special_tokens=False).input_ids]

    assert pieces("1234567") == ["123", "456", "7"]
    assert pieces("12.50%") == ["12", ".", "50", "%"]
    for number in range(1000):
        assert len(pieces(f"{number:03d}")) == 1


def test_the_vocabulary_is_between_two_and_six_thousand(packaged: PreTrainedTokenizerBase) -> None:
    assert 2000 <= len(packaged) <= 6000


def test_every_name_is_one_token(packaged: PreTrainedTokenizerBase) -> None:
    for language, prefix in (("en", " "), ("zh", "")):
        for name in NAMES[language]:
            assert len(packaged(prefix + name, add_special_tokens=False).input_ids) == 1, name
    attributes = [a.name for domain in DOMAINS["zh"] for a in domain.attributes]
    assert all(len(packaged(name, add_special_tokens=False).input_ids) == 1 for name in attributes)


def test_the_template_marks_turns_and_can_open_an_answer(packaged: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "What is 5% of 100?"}, {"role": "assistant", "content": "5% of 100 is 5."}]
    text = packaged.apply_chat_template(messages, tokenize=False)
    assert text == "[gMASK]<sop><|user|>What is 5% of 100?<|assistant|>5% of 100 is 5."
    opened = packaged.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert opened == "[gMASK]<sop><|user|>What is 5% of 100?<|assistant|>"


def test_a_dialogue_of_two_hundred_turns_fits_in_four_thousand_tokens(packaged: PreTrainedTokenizerBase) -> None:
    for row in corpus.dialogues(5, 6, 200):
        text = packaged.apply_chat_template(row["messages"], tokenize=False)
        assert len(packaged(text, add_special_tokens=False).input_ids) < 4096
