from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_stubs import CharTokenizer

from glm5_quant.eval.documents import Document, Encoder, as_documents, language_of
from glm5_quant.eval.prefix import Prefix, find_prefix
from glm5_quant.eval.score import Marker
from glm5_quant.eval.windows import batches, cut, plan_windows
from glm5_quant.model.errors import UserError
from glm5_quant.model.texts import Text


def encoded(lengths: list[int], prefix: Prefix) -> list[object]:
    texts = [list(range(100, 100 + length)) for length in lengths]
    return list(Encoder(None, prefix)(as_documents(texts)))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    window=st.integers(4, 20),
    stride=st.integers(1, 17),
    prefixed=st.booleans(),
    batch_size=st.integers(1, 4),
    side=st.sampled_from(["left", "right"]),
)
def test_each_token_but_the_first_is_scored_exactly_once(
    lengths: list[int], window: int, stride: int, prefixed: bool, batch_size: int, side: str
) -> None:
    prefix = Prefix(ids=(7, 8), text="", rule="glm") if prefixed else Prefix()
    plan = plan_windows(window, min(stride, window - len(prefix.ids) - 1), prefix.ids, None)
    documents = encoded(lengths, prefix)
    scored: dict[int, list[int]] = {}
    for batch in batches(cut(documents, plan), batch_size, side):
        rows, positions = batch.rows_and_targets()
        for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
            token = int(batch.ids[row, position])
            scored.setdefault(batch.windows[row].encoded.index, []).append(token)
            before = int(batch.ids[row, position - 1])
            assert before == token - 1 or (token == 100 and before == 8)
    for document in documents:
        first = 0 if prefixed else 1
        assert sorted(scored.get(document.index, [])) == document.ids[first:].tolist()


def test_what_fills_a_batch_up_is_masked_and_each_window_keeps_its_critical_tokens() -> None:
    prefix = Prefix(ids=(7,), text="", rule="bos")
    short, long = encoded([2, 4], prefix)
    long = replace(long, critical=np.array([True, False, True, True]))
    for side, mask in (("right", [[1] * 5, [1, 1, 1, 0, 0]]), ("left", [[1] * 5, [0, 0, 1, 1, 1]])):
        (batch,) = batches(cut([short, long], plan_windows(9, None, prefix.ids, None)), 2, side)
        assert batch.mask is not None and batch.mask.tolist() == mask
        assert (batch.ids * batch.mask).tolist() == batch.ids.tolist()
        assert batch.ids[batch.mask.bool()].tolist() == [7, 100, 101, 102, 103, 7, 100, 101]
    (alone,) = batches(cut([long], plan_windows(9, None, prefix.ids, None)), 2)
    assert alone.mask is None
    parts = list(cut([long], plan_windows(3, None, prefix.ids, None)))
    assert [part.ids.tolist() for part in parts] == [[7, 100, 101], [7, 101, 102], [7, 102, 103]]
    marks = [[False, True, False], [False, False, True], [False, True, True]]
    assert [part.critical.tolist() for part in parts] == marks


def test_the_prefix_stands_once_before_every_window_and_is_never_scored() -> None:
    prefix = Prefix(ids=(7, 8), text="[gMASK]<sop>", rule="glm")
    documents = list(Encoder(None, prefix)(as_documents([[7, 8, 7, 8, 10, 11, 12, 13, 14]])))
    windows = list(cut(documents, plan_windows(5, None, prefix.ids, None)))
    assert sum(len(window.ids) - window.first_scored for window in windows) == 5
    for window in windows:
        assert window.ids[:2].tolist() == [7, 8]
        assert 7 not in window.ids[2:].tolist()
        assert window.first_scored >= 2


def test_prefix_rules_choose_glm_then_the_tokenizers_own_then_bos_and_never_eos() -> None:
    glm = CharTokenizer(special=["[gMASK]", "<sop>"])
    assert find_prefix(glm).text == "[gMASK]<sop>"
    added = CharTokenizer(bos="<s>", adds_bos=True, adds_eos=True)
    assert (find_prefix(added).rule, find_prefix(added).ids) == ("tokenizer", (0,))
    named = CharTokenizer(bos="<s>", adds_eos=True)
    assert (find_prefix(named).rule, find_prefix(named).ids) == ("bos", (0,))
    qwen_like = CharTokenizer(adds_eos=True)
    assert find_prefix(qwen_like) == Prefix()
    assert find_prefix(added, "none") == Prefix()
    with pytest.raises(ValueError, match="prefix must be"):
        find_prefix(added, "eos")


def test_a_text_that_already_starts_with_bos_does_not_get_a_second_one() -> None:
    tokenizer = CharTokenizer(bos="<s>", adds_bos=True)
    prefix = find_prefix(tokenizer)
    documents = list(Encoder(tokenizer, prefix)(as_documents(["<s>abc", "abc"])))
    assert documents[0].ids.tolist() == documents[1].ids.tolist()


def test_empty_and_one_token_texts_are_skipped_and_counted() -> None:
    without, with_bos = CharTokenizer(), CharTokenizer(bos="<s>")
    encoder = Encoder(without, find_prefix(without))
    assert [len(found.ids) for found in encoder(as_documents(["", "a", "normal"]))] == [6]
    assert (encoder.empty, encoder.seen) == (2, 3)
    encoder = Encoder(with_bos, find_prefix(with_bos))
    assert [len(found.ids) for found in encoder(as_documents(["", "a", "normal"]))] == [1, 6]
    assert (encoder.empty, encoder.seen) == (1, 3)


@pytest.mark.parametrize(
    ("window", "stride", "positions", "problem"),
    [(2, None, None, "no room"), (10, 9, None, "stride"), (10, 0, None, "stride"), (600, None, 512, "max_position")],
)
def test_windows_without_room_and_windows_past_the_models_positions_are_refused(
    window: int, stride: int | None, positions: int | None, problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        plan_windows(window, stride, (1,), positions)


def test_slices_of_a_window_are_those_of_its_scored_tokens() -> None:
    """Ids 100 to 107 in windows of 5 that share 2; 101 and 104 are numeric, and so is the last id of the table, 105."""
    numeric = np.zeros(106, dtype=np.bool_)
    numeric[[0, 101, 104, 105]] = True
    (document,) = encoded([8], Prefix())
    document = replace(
        document,
        critical=np.array([0, 1, 1, 0, 0, 0, 1, 0], dtype=np.bool_),
        document=Document(text=[], file="a.txt", language="en", kind="long"),
    )
    marker, found = Marker(numeric, (0, 2, 4)), []
    for window in cut([document], plan_windows(5, 3, (), None)):
        slices = marker.slices(window, window.ids[window.first_scored :])
        assert [name for name, mask in slices.items() if mask is None] == [
            "all", "file:a.txt", "language:en", "stress:long"
        ]  # fmt: skip
        found.append({name: mask.astype(int).tolist() for name, mask in slices.items() if mask is not None})
    assert found == [
        {
            "numeric": [1, 0, 0, 1],
            "critical": [1, 1, 0, 0],
            "position:0-1": [1, 0, 0, 0],
            "numeric position:0-1": [1, 0, 0, 0],
            "position:2-3": [0, 1, 1, 0],
            "numeric position:2-3": [0, 0, 0, 0],
            "position:4+": [0, 0, 0, 1],
            "numeric position:4+": [0, 0, 0, 1],
        },
        {
            "numeric": [1, 0, 0],  # 105, and two ids past the table
            "critical": [0, 1, 0],
            "position:2-3": [1, 1, 0],
            "numeric position:2-3": [1, 0, 0],
            "position:4+": [0, 0, 1],
            "numeric position:4+": [0, 0, 0],
        },
    ]


def test_windows_after_the_first_keep_the_stated_context() -> None:
    documents = encoded([20], Prefix())
    spans = [(w.ids.tolist(), w.first_scored, w.position) for w in cut(documents, plan_windows(8, 4, (), None))]
    assert spans[0] == (list(range(100, 108)), 1, 1)
    assert spans[1] == (list(range(104, 112)), 4, 8)
    assert spans[-1] == (list(range(112, 120)), 4, 16)


def test_the_window_limit_counts_windows_over_all_documents() -> None:
    documents = encoded([20, 20], Prefix())
    assert len(list(cut(documents, plan_windows(8, None, (), None), limit=4))) == 4


def test_a_document_past_the_limit_is_neither_encoded_nor_counted() -> None:
    encoder = Encoder(None, Prefix())
    windows = list(cut(encoder(as_documents([[1, 2, 3]] * 5)), plan_windows(8, None, (), None), limit=2))
    assert (len(windows), encoder.seen) == (2, 2)


def test_languages_are_told_by_script() -> None:
    assert language_of("The balance is 12.5%") == "en"
    assert language_of("余额是 12.5%，type A") == "zh"
    assert language_of("残高はいくらですか") == "ja"
    assert language_of("잔액은 얼마입니까") == "ko"
    assert language_of("12.5%") == ""
    assert language_of("Это кабель USB для компьютера") == ""
    assert language_of("नमस्ते GPS") == ""
    assert language_of("Ärger über Öl") == "en"


def test_chat_rows_are_rendered_by_the_template_where_there_is_one() -> None:
    class Row:
        text = None
        messages = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"})
        file = "a/b.jsonl"

    class Templated(CharTokenizer):
        def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool) -> str:
            return "".join(f"[{m['role']}]{m['content']}" for m in messages)

    templated = Templated()
    templated.chat_template = "yes"
    assert next(as_documents([Row()], templated)).text == "[user]hi[assistant]ho"
    plain = next(as_documents([Row()]))
    assert (plain.text, plain.file, plain.language) == ("hi\nho", "b.jsonl", "en")
    assert np.asarray(plain.text).size == 1


class Marked(CharTokenizer):
    """A template whose marks are longer than the words of a short turn."""

    def __init__(self) -> None:
        super().__init__()
        self.chat_template = "yes"

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool) -> str:
        return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n{m.get('tool', '')}" for m in messages)


def test_the_marks_of_a_chat_template_do_not_decide_the_language() -> None:
    row = Text(file="a.jsonl", line=1, messages=({"role": "user", "content": "好的"},))
    assert next(as_documents([row], Marked())).language == "zh"


def test_half_a_character_is_named_before_it_reaches_the_tokenizer() -> None:
    row = Text(file="a.jsonl", line=7, messages=({"role": "user", "content": "x", "tool": "\ud83d"},))
    with pytest.raises(UserError, match=r"a\.jsonl: row 7: half a character"):
        next(as_documents([row], Marked()))
    with pytest.raises(UserError, match="texts: text 2: half a character"):
        list(as_documents(["a", "b \ud83d"]))


def test_files_of_the_same_name_in_two_folders_stay_apart() -> None:
    files = ("data/en/test.jsonl", "data/zh/test.jsonl", "data/zh/more.jsonl")
    rows = [Text(file=file, line=1, text="a") for file in files]
    assert [document.file for document in as_documents(rows)] == ["en/test.jsonl", "zh/test.jsonl", "more.jsonl"]


def test_a_token_id_outside_the_embedding_is_named_with_its_file() -> None:
    encoder = Encoder(None, Prefix(), vocab_size=10)
    documents = [Document(text=[1, 9, 2], file="a"), Document(text=[1, 10, 2], file="b")]
    with pytest.raises(UserError, match=r"b: text 2: a token id is outside .*; found id 10; expected 0 to 9"):
        list(encoder(documents))
