from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support_models import byte_tokenizer
from support_paths import shared
from support_stubs import CharTokenizer

from glm5_quant.eval.config import EvalConfig
from glm5_quant.eval.critical import DEFAULT_WORDS, CriticalWords, read_critical_words
from glm5_quant.eval.numbers import compare_numbers, find_numbers, misread, same_numbers
from glm5_quant.eval.tasks import Problem, _result, final_number, read_task, read_tasks
from glm5_quant.model.errors import UserError
from glm5_quant.model.texts import load_tokenizer

RANGES = (("10", True), ("20", True), ("5", False), ("10", False), ("3", False), ("5", False))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It costs $1,234.50 or 12.5%.", [("1234.50", False), ("12.5", True)]),
        ("from -3 to 4", [("-3", False), ("4", False)]),
        ("range 3-4", [("3", False), ("4", False)]),
        ("利率１２．５％，限额 200 万", [("12.5", True), ("2000000", False)]),
        ("百分之12.5", [("12.5", True)]),
        ("12 percent, x86 and A7", [("12", True)]),
        ("call 555-0100 at 9:30.", [("555", False), ("0100", False), ("9", False), ("30", False)]),
        ("1,2,3", [("1", False), ("2", False), ("3", False)]),
        ("10%-20%, 5元-10元 and 3月-5月", list(RANGES)),
        ("为-5%，负2.3%，正负1%", [("-5", True), ("-2.3", True), ("1", True)]),
        ("p = .05 and -.5, v. 2...7", [(".05", False), ("-.5", False), ("2", False), ("7", False)]),
        ("RMB12.5, USD100, CNY1,200, A7", [("12.5", False), ("100", False), ("1200", False)]),
        ("3万元, 2亿, 1.2万亿", [("30000", False), ("2e8", False), ("1.2e12", False)]),
        ("$1.2 million, 3 Billion, 5 millionaires", [("1200000", False), ("3e9", False), ("5", False)]),
        ("4 thousand, 2.5 trillion", [("4000", False), ("2.5e12", False)]),
        ("10⁶, 12.5¹, 3½, 50m²", [(n, False) for n in ("10", "6", "12.5", "1", "3", "1", "2", "50")]),
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
        ("3万元", "3亿元", "point shifted"),
        ("3万", "30000", "equal"),
        ("1.2 million", "1.2 billion", "point shifted"),
        ("123456789012345678901234567890", "123456789012345678901234567891", "digit changed"),
        ("3", "9841", "other number"),
        ("10", "1.0", "point shifted"),
        ("0.125", "12.50", "point shifted"),
        ("1200", "120", "digit dropped"),
        ("4821", "46", "other number"),
        ("46", "4821", "other number"),
        ("123", "0", "other number"),
        ("0", "123", "other number"),
    ],
)
def test_one_number_read_as_another_is_told_by_kind(wanted: str, got: str, kind: str) -> None:
    assert misread(find_numbers(wanted)[0], find_numbers(got)[0]) == kind


def test_lists_of_numbers_are_aligned_before_they_are_compared() -> None:
    wanted, got = find_numbers("10, 20, 30 and 45%"), find_numbers("10; 30; 45; 7")
    assert compare_numbers(wanted, got) == {"equal": 2, "missing": 1, "percent sign lost": 1, "extra": 1}
    assert not same_numbers(wanted, got)
    assert same_numbers(find_numbers("1,000"), find_numbers("1000.0"))
    assert same_numbers(find_numbers("10%-20%"), find_numbers("10% to 20%"))
    assert not same_numbers(find_numbers("3万元"), find_numbers("3亿元"))
    # Longer than the 28 digits that decimal arithmetic keeps.
    assert not same_numbers(find_numbers("9" * 29 + "1"), find_numbers("9" * 29 + "2"))


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


def test_a_critical_word_is_found_with_either_apostrophe_and_with_signs_at_its_ends(tmp_path: Path) -> None:
    words = CriticalWords(DEFAULT_WORDS)
    assert words.find("You can’t and you can't") == ["can't", "can't"]
    assert words.find("是not的，nothing") == ["not"]
    rated = CriticalWords(["AA", "AA+", "10%", "don’t"])
    assert rated.find("评级AA+下调, AA, AAA, 10% not 110%; DON'T") == ["aa+", "aa", "10%", "don't"]
    assert CriticalWords(["über", "не"]).find("darüber über неделя не") == ["über", "не"]
    file = tmp_path / "words.txt"
    file.write_bytes("\ufeffnot\nlimit\n".encode())
    found = read_critical_words(file)
    assert found is not None and found.find("not a limit") == ["not", "limit"]


def test_tokens_that_touch_a_critical_word_are_marked(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    words, text = CriticalWords(["not", "不"]), "do not 不 go"
    ids = tokenizer.encode(text, add_special_tokens=False)
    marks = words.mark(tokenizer, text, len(ids))
    marked = bytes(token for token, mark in zip(ids, marks, strict=True) if mark).decode("utf-8")
    assert marked == "not不"
    assert words.mark(tokenizer, text, 4).tolist() == [True, False, False, False]  # the last byte of 不, and " go"
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
        ('{"question": "q", "answer": "It is 5."}\n', "not a numeric problem"),
        ('{"input": "q", "golden": "7"}\n{"input": "q", "golden": "none"}\n', "row 2: the answer is no number"),
        ('{"input": "q", "golden": "none"}\n', "no number"),
        ("[]", "empty"),
        ("{", "cannot read"),
        ("[1, 2]", "not a row of a task"),
        ('{"Body": "b", "Answer": 3}\n', "not a numeric problem"),
        ("[" * 100_000, "cannot read"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=problem):
            read_task(file)
    packed = tmp_path / "task.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps({"input": "q", "golden": "7"}).encode()))
    assert read_task(packed)[0].answer.value == 7
    packed.write_bytes(packed.read_bytes()[:12] + b"\xff" * 20)
    with pytest.raises(UserError, match="cannot read"):
        read_task(packed)


def test_a_task_is_read_with_a_byte_order_mark_blank_lines_and_line_ends_of_other_scripts(tmp_path: Path) -> None:
    file = tmp_path / "task.jsonl"
    file.write_bytes(
        '\ufeff{"input": "a\u2028b", "golden": "5"}\r\n  \n{"Body": 3, "Question": "q", "Answer": 4}\n'.encode()
    )
    assert [(problem.question, problem.answer.value) for problem in read_task(file)] == [("a\u2028b", 5), ("3. q", 4)]


def test_tasks_of_one_file_name_are_told_apart_and_one_file_twice_is_refused(tmp_path: Path) -> None:
    for name in ("gsm8k", "cmath"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "test.jsonl").write_text('{"input": "q", "golden": "5"}\n' * 3)
    files = [tmp_path / "gsm8k" / "test.jsonl", tmp_path / "cmath" / "test.jsonl"]
    assert {name: len(rows) for name, rows in read_tasks(files, 2).items()} == {"gsm8k/test": 2, "cmath/test": 2}
    assert list(read_tasks(files[:1], 9)) == ["test"]
    assert read_tasks((), 9) == {}
    with pytest.raises(UserError, match="named twice"):
        read_tasks([files[0], str(files[0])], 9)


def test_the_answer_of_a_text_is_the_marked_number_or_the_last() -> None:
    assert final_number("3 + 4 = 7\n#### 7 apples of 12").value == 7
    assert final_number("so 3 and 4 make 7.").value == 7
    assert final_number("none") is None


def test_shares_of_right_answers_and_misreads_of_a_task_worked_by_hand() -> None:
    def numbers(*texts: str | None) -> list[Any]:
        return [None if text is None else find_numbers(text)[0] for text in texts]

    problems = [Problem(question="q", answer=answer) for answer in numbers("5", "7", "12", "30", "1,000")]
    session: Any = SimpleNamespace(config=EvalConfig(draws=50))
    found = _result(
        session, "t", problems, numbers("5", None, "-12", "8", "100"), numbers("5.0", "7", "12", None, "1,001")
    )
    assert (found.name, found.problems) == ("t", 5)
    assert (found.source_exact.value, found.exact.value) == (1 / 5, 3 / 5)
    assert found.difference.value == pytest.approx(2 / 5)
    assert found.source_misreads == {"equal": 1, "missing": 1, "sign changed": 1, "other number": 1, "digit dropped": 1}
    assert found.misreads == {"equal": 3, "missing": 1, "digit changed": 1}
