from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from glm5_quant.eval.prefix import find_prefix
from glm5_quant.model.errors import UserError
from glm5_quant.model.texts import Text, load_tokenizer
from glm5_quant.model.tokenizing import affixes, encode

WORDS = {"[UNK]": 0, "<s>": 1, "</s>": 2, "<sop>": 3, "a": 4, "b": 5, "user": 6, "hi": 7}


def save_tokenizer(folder: Path, *, rule: str = "$A", template: str | None = None, **config: Any) -> Path:
    """A word-level tokenizer whose own rule for plain texts is `rule`, for example "<s> $A"."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>", "<sop>"])
    special = [(word, WORDS[word]) for word in rule.split() if word in WORDS]
    tokenizer.post_processor = processors.TemplateProcessing(single=rule, special_tokens=special)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


CHAT = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
DIALOGUE = Text(file="chat.jsonl", line=7, messages=({"role": "user", "content": "hi"},))
PLAIN = Text(file="a.txt", line=1, text="a b")


@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [("$A", [], []), ("<s> $A", [1], []), ("$A </s>", [], [2]), ("<s> <sop> $A </s>", [1, 3], [2])],
)
def test_affixes_are_what_the_tokenizer_itself_adds(
    tmp_path: Path, rule: str, before: list[int], after: list[int]
) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, rule=rule))
    assert affixes(tokenizer) == (before, after)
    assert encode(tokenizer, PLAIN) == [*before, 4, 5, *after] == tokenizer("a b")["input_ids"]


def test_affixes_of_a_vocabulary_that_drops_small_letters(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"<s>": 0, "A": 1, "C": 2, "G": 3, "T": 4}, merges=[]))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert affixes(loaded) == ([0], [])
    assert find_prefix(loaded).ids == (0,)
    assert encode(loaded, Text(file="dna.txt", line=1, text="ACGT")) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("template", [CHAT, "<s>" + CHAT], ids=["template without BOS", "template with BOS"])
def test_a_rendered_dialogue_has_exactly_one_bos(tmp_path: Path, template: str) -> None:
    """Field case O-31."""
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, rule="<s> $A", template=template))
    assert encode(tokenizer, DIALOGUE) == [1, 6, 7]


def test_a_tokenizer_without_bos_gets_none(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, template=CHAT))
    assert encode(tokenizer, DIALOGUE) == [6, 7]


def test_a_text_that_was_rendered_with_bos_and_eos_gets_no_second_ones(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, rule="<s> $A </s>"))
    assert encode(tokenizer, Text(file="a", line=1, text="<s> a b </s>")) == [1, 4, 5, 2]


def test_messages_without_a_chat_template_name_file_and_row(tmp_path: Path) -> None:
    """Field case O-29."""
    tokenizer = load_tokenizer(save_tokenizer(tmp_path))
    with pytest.raises(UserError, match=r"chat\.jsonl: row 7: the row holds messages, but the tokenizer has no chat"):
        encode(tokenizer, DIALOGUE)


def test_half_a_character_names_file_and_row(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, template=CHAT))
    broken = Text(file="cut.jsonl", line=3, text="a \ud83d")
    for text in (broken, replace(broken, text=None, messages=({"role": "user", "content": "\ud83d"},))):
        with pytest.raises(UserError, match=r"cut\.jsonl: row 3: half a character"):
            encode(tokenizer, text)


def test_a_template_that_refuses_the_messages_is_quoted(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, template=template))
    with pytest.raises(UserError, match="row 7: the chat template refuses these messages; found roles must alternate"):
        encode(tokenizer, DIALOGUE)


def test_an_unknown_model_type_is_served_by_its_tokenizer_file_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tokenizer(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "never_heard_of"}))
    assert load_tokenizer(folder)("a b")["input_ids"] == [4, 5]
    assert caplog.text == ""


def test_a_document_longer_than_the_model_raises_no_alarm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, model_max_length=4))
    assert len(tokenizer.encode("a b " * 10)) == 20
    assert caplog.text == ""


def test_code_beside_a_tokenizer_is_never_run(tmp_path: Path) -> None:
    """Field case O-45."""
    marker = tmp_path / "marker"
    folder = save_tokenizer(tmp_path / "model", tokenizer_class="Mine", auto_map={"AutoTokenizer": [None, "mine.Mine"]})
    (folder / "mine.py").write_text(f"open({str(marker)!r}, 'w')\nclass Mine: pass\n")
    assert load_tokenizer(folder)("a b")["input_ids"] == [4, 5]
    assert not marker.exists()


def test_a_folder_without_a_tokenizer_says_which_files_were_expected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(UserError, match=r"no tokenizer in this folder; expected tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_file_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)
