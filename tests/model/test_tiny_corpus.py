"""The synthetic dialogues: one right answer a turn, deterministic, and distances that do not flatter."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from glm5_quant.model.tiny import corpus
from glm5_quant.model.tiny.words import BASES, DOMAINS, NAMES, PERCENTS, Language

STATED = {
    "en": re.compile(r"the (?P<key>[a-z ]+ of \w+) is (?P<value>.+)\.$"),
    "zh": re.compile(r":(?P<key>\w+,\w\w)为(?P<value>.+)。$"),
}
ANSWERED = {
    "en": re.compile(r"^The (?P<key>[a-z ]+ of \w+) is (?P<value>.+)\.$"),
    "zh": re.compile(r"^回复:(?P<key>\w+,\w\w)为(?P<value>.+)。$"),
}


def ledger_replay(row: dict[str, Any]) -> None:
    """Answer every question from what was stated before it, with a dictionary, and compare text and distance."""
    language: Language = row["language"]
    ledger: dict[str, str] = {}
    mentioned: dict[str, int] = {}
    for turn, answer in enumerate(row["answers"]):
        user, said = row["messages"][2 * turn]["content"], row["messages"][2 * turn + 1]["content"]
        assert answer["turn"] == turn
        if answer["kind"] == "noted":
            stated = STATED[language].search(user)
            assert stated is not None, user
            assert stated["key"] not in ledger, "a fact is stated once"
            ledger[stated["key"]], mentioned[stated["key"]] = stated["value"], turn
        elif answer["kind"] != "sum":
            got = ANSWERED[language].match(said)
            assert got is not None, said
            assert got["key"] in user
            assert ledger[got["key"]] == got["value"]
            assert answer["distance"] == turn - mentioned[got["key"]]
            mentioned[got["key"]] = turn


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("turns", [1, 7, 40, 250])
def test_a_dictionary_of_what_was_stated_answers_every_fact_question(language: Language, turns: int) -> None:
    for row in corpus.dialogues(11, 6, turns, language):
        assert len(row["messages"]) == 2 * turns
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"] * turns
        ledger_replay(row)


def test_sums_and_percentages_are_right() -> None:
    seen = 0
    for row in corpus.dialogues(3, 120, 60):
        for turn, answer in enumerate(row["answers"]):
            if answer["kind"] == "sum":
                seen += 1
                said = row["messages"][2 * turn + 1]["content"]
                a, b, c = (int(piece) for piece in re.findall(r"\d+", said))
                added = "%" not in said
                percent, base = (b, a) if "的" in said else (a, b)
                assert c == (a + b if added else percent * base // 100), said
    assert seen > 50
    assert all(p * n % 100 == 0 for p in PERCENTS for n in BASES)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_text(tmp_path: Path) -> None:
    for name in ("first", "second"):
        corpus.export_jsonl(tmp_path / name, corpus.dialogues(5, 3, 20))
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    assert corpus.dialogues(5, 1, 20) != corpus.dialogues(6, 1, 20)
    rows = [json.loads(line) for line in (tmp_path / "first").read_text(encoding="utf-8").splitlines()]
    assert rows == corpus.dialogues(5, 3, 20)


def test_dialogue_zero_of_this_version_is_the_text_it_always_was() -> None:
    first = corpus.dialogue(0, 3, "en")["messages"]
    assert first == GOLDEN


GOLDEN = json.loads((Path(__file__).parent / "golden_dialogue.json").read_text(encoding="utf-8"))


def test_training_calibration_and_evaluation_never_share_a_dialogue() -> None:
    seeds = [corpus.TRAINING_SEED, corpus.CALIBRATION_SEED, corpus.EVALUATION_SEED]
    assert min(b - a for a, b in itertools.pairwise(seeds)) > 10_000_000
    texts = [
        json.dumps(rows[0]["messages"]) for rows in (corpus.calibration_dialogues(1), corpus.evaluation_dialogues(1))
    ]
    assert texts[0] != texts[1]


def test_long_dialogues_ask_at_every_distance_up_to_two_hundred_turns() -> None:
    distances = [a["distance"] for row in corpus.dialogues(9, 20, 250) for a in row["answers"] if a["distance"]]
    assert min(distances) == 1
    assert max(distances) >= 200
    assert sum(distance >= 100 for distance in distances) > 200


def test_both_languages_hold_the_word_pairs_whose_confusion_does_harm() -> None:
    text = {
        language: " ".join(m["content"] for row in corpus.dialogues(1, 60, 60, language) for m in row["messages"])
        for language in ("en", "zh")
    }
    for word in ("保守型", "进取型", "上限", "下限", "除非", "不高于", "不低于"):
        assert word in text["zh"]
    for word in (
        "conservative",
        "aggressive",
        "upper limit",
        "lower limit",
        "unless",
        "not more than",
        "not less than",
    ):
        assert word in text["en"]


def test_three_domains_and_two_languages_occur_and_names_are_unique() -> None:
    rows = corpus.dialogues(2, 80, 4)
    assert {row["domain"] for row in rows} == {domain.name for domain in DOMAINS["en"]}
    assert {row["language"] for row in rows} == {"en", "zh"}
    for names in NAMES.values():
        assert len(names) == len(set(names)) >= 90


@pytest.mark.parametrize("bad", [{"count": 0}, {"turns": 0}, {"language": "fr"}])
def test_impossible_requests_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        corpus.dialogues(**{"seed": 0, "count": 1, "turns": 1, **bad})
