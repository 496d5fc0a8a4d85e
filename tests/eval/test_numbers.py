from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path

import pytest
from support_models import byte_tokenizer
from support_paths import shared
from support_stubs import CharTokenizer

from glm5_quant.eval.critical import DEFAULT_WORDS, CriticalWords, read_critical_words
from glm5_quant.eval.numbers import compare_numbers, find_numbers, misread, same_numbers
from glm5_quant.eval.tasks import final_number, read_task
from glm5_quant.model.errors import UserError
from glm5_quant.model.texts import load_tokenizer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It costs $1,234.50 or 12.5%.", [("1234.50", False), ("12.5", True)]),
        ("from -3 to 4", [("-3", False), ("4", False)]),
        ("range 3-4", [("3", False), ("4", False)]),
        ("利率１２．５％，限额 200 万", [("12.5", True), ("200", False)]),
        ("百分之12.5", [("12.5", True)]),
        ("12 percent, x86 and A7", [("12", True)]),
        ("call 555-0100 at 9:30.", [("555", False), ("0100", False), ("9", False), ("30", False)]),
        ("1,2,3", [("1", False), ("2", False), ("3", False)]),
        ("no numbers", []),
    ],
)
def test_numbers_are_found_with_sign_separators_and_percent(text: str, expected: list[tuple[str, bool]]) -> None:
    assert [(n.value, n.percent) for n in find_numbers(text)] == [(Decimal(v), p) for v, p in expected]


@pytest.mark.parametrize(
    ("wanted", "got", "kind"),
    [
        ("12.5%", "12.5%", "equal"),
        ("12.50", "12.5", "equal"),
        ("12.5%", "12.5", "percent sign lost"),
        ("12.5", "12.5%", "percent sign added"),
        ("12.5%", "125%", "point shifted"),
        ("1.25", "12.5", "point shifted"),
        ("0.05", "0.5", "point shifted"),
        ("200000", "20000", "digit dropped"),
        ("48213", "4813", "digit dropped"),
        ("4813", "48213", "digit added"),
        ("48213", "48273", "digit changed"),
        ("5", "7", "digit changed"),
        ("48213", "17654", "other number"),
        ("-40", "40", "sign changed"),
        ("3", "9841", "other number"),
    ],
)
def test_one_number_read_as_another_is_told_by_kind(wanted: str, got: str, kind: str) -> None:
    assert misread(find_numbers(wanted)[0], find_numbers(got)[0]) == kind


def test_lists_of_numbers_are_aligned_before_they_are_compared() -> None:
    wanted, got = find_numbers("10, 20, 30 and 45%"), find_numbers("10; 30; 45; 7")
    assert compare_numbers(wanted, got) == {"equal": 2, "missing": 1, "percent sign lost": 1, "extra": 1}
    assert not same_numbers(wanted, got)
    assert same_numbers(find_numbers("1,000"), find_numbers("1000.0"))


def test_critical_words_are_found_whole_in_latin_and_anywhere_in_chinese(tmp_path: Path) -> None:
    words = CriticalWords(DEFAULT_WORDS)
    assert words.find("Do NOT note: at most 5, unless approved") == ["not", "at most", "unless", "approved"]
    assert words.find("您属于保守型，不超过五万") == ["保守型", "不超过"]
    file = tmp_path / "words.txt"
    file.write_text("# risk\nprudent\n进取型\n", encoding="utf-8")
    found = read_critical_words(file)
    assert found is not None and found.words == ("prudent", "进取型")
    assert read_critical_words("") is None
    assert read_critical_words("default") is not None
    with pytest.raises(UserError, match="cannot read the critical words"):
        read_critical_words(tmp_path / "missing.txt")
    with pytest.raises(UserError, match="no critical words"):
        CriticalWords(["", " "])


def test_tokens_that_touch_a_critical_word_are_marked(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    words, text = CriticalWords(["not", "不"]), "do not 不 go"
    ids = tokenizer.encode(text, add_special_tokens=False)
    marks = words.mark(tokenizer, text, len(ids))
    marked = bytes(token for token, mark in zip(ids, marks, strict=True) if mark).decode("utf-8")
    assert marked == "not不"
    assert words.mark(CharTokenizer(), text, 5) is None


@pytest.mark.parametrize(
    ("path", "count", "first"),
    [
        ("data/gsm8k/gsm8k_test.jsonl.gz", 1319, "18"),
        ("data/svamp/SVAMP.json.gz", 1000, "51"),
        ("data/cmath/cmath_dev.jsonl.gz", 600, "9"),
    ],
)
def test_the_three_numeric_tasks_are_read(path: str, count: int, first: str) -> None:
    problems = read_task(shared(path))
    assert len(problems) == count
    assert problems[0].answer.value == Decimal(first)
    assert problems[0].question


def test_a_task_that_cannot_be_read_names_file_row_and_columns(tmp_path: Path) -> None:
    file = tmp_path / "task.jsonl"
    for text, problem in (
        ('{"a": 1}\n', "not a numeric problem"),
        ('{"input": "q", "golden": "none"}\n', "no number"),
        ("[]", "empty"),
        ("{", "cannot read"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=problem):
            read_task(file)
    packed = tmp_path / "task.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps({"input": "q", "golden": "7"}).encode()))
    assert read_task(packed)[0].answer.value == 7


def test_the_answer_of_a_text_is_the_marked_number_or_the_last() -> None:
    assert final_number("3 + 4 = 7\n#### 7 apples of 12").value == 7
    assert final_number("so 3 and 4 make 7.").value == 7
    assert final_number("none") is None
