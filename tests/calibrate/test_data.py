from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support_paths import shared

from glm5_quant.calibrate.data import pack_windows
from glm5_quant.calibrate.scripts import hint_about_scripts, script_shares
from glm5_quant.model.errors import UserError
from glm5_quant.model.texts import Texts, load_tokenizer, read_texts


class Letters:
    """A stand-in tokenizer: one id a letter, BOS (1) before a plain text, and a count of the letters it was given."""

    chat_template = None

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        self.seen += len(text)
        return {"input_ids": [1] * add_special_tokens + [ord(letter) for letter in text]}


def _texts(tmp_path: Path, *documents: str) -> Texts:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents), encoding="utf-8")
    return read_texts(path)


def _pack(texts: Texts, **settings: Any) -> Any:
    return pack_windows(texts, Letters(), **settings)


def test_documents_follow_each_other_with_one_bos_each_and_no_padding(tmp_path: Path) -> None:
    """Field case O-28: without pads there is nothing a mask could forget; every id in a window is real."""
    packed = _pack(_texts(tmp_path, "aaa", "bbbb", "cc"), num_samples=2, seqlen=6, seed=0)
    flat = packed.ids.flatten().tolist()
    assert packed.ids.shape == (2, 6)
    assert packed.ids.dtype == torch.int64
    assert flat.count(1) == 3
    assert sorted(flat) == sorted([1, 97, 97, 97, 1, 98, 98, 98, 98, 1, 99, 99])
    assert packed.lengths == (6, 6)


def test_long_documents_are_split_over_windows_and_nothing_is_lost_silently(tmp_path: Path) -> None:
    """Field case O-30."""
    texts = _texts(tmp_path, *("x" * 1999 for _ in range(3)), "y" * 99)
    packed = _pack(texts, num_samples=128, seqlen=512, seed=3)
    assert packed.ids.shape == (11, 512)
    assert (packed.rows_in, packed.rows_used) == (4, 4)
    assert packed.tokens_used + packed.tokens_cut == 3 * 2000 + 100
    assert packed.rows_cut >= 1
    assert "fill only 11 of 128 windows" in packed.warnings[0]


def test_documents_that_were_not_needed_are_counted(tmp_path: Path) -> None:
    packed = _pack(_texts(tmp_path, *("abc" for _ in range(10))), num_samples=2, seqlen=5)
    assert (packed.rows_used, packed.rows_left, packed.rows_cut) == (3, 7, 1)
    assert (packed.tokens_used, packed.tokens_cut) == (10, 2)
    assert packed.documents == (2, 2)


def test_data_shorter_than_one_window_give_one_shorter_window_and_a_warning(tmp_path: Path) -> None:
    packed = _pack(_texts(tmp_path, "abcdefg"), num_samples=4, seqlen=512)
    assert packed.ids.tolist() == [[1, *map(ord, "abcdefg")]]
    assert packed.lengths == (8,)
    assert any("one window of 8 tokens" in warning for warning in packed.warnings)


def test_a_tail_is_cut_when_full_windows_exist(tmp_path: Path) -> None:
    packed = _pack(_texts(tmp_path, "a" * 13), num_samples=9, seqlen=5)
    assert packed.ids.shape == (2, 5)
    assert (packed.tokens_cut, packed.rows_cut) == (4, 1)


def test_the_seed_alone_decides_the_order(tmp_path: Path) -> None:
    texts = _texts(tmp_path, *(chr(97 + i) * 20 for i in range(20)))
    one, again, other = (_pack(texts, num_samples=4, seqlen=8, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.ids, again.ids)
    assert one.sha256 == again.sha256 != other.sha256


def test_packing_leaves_the_global_random_state_alone(tmp_path: Path) -> None:
    import random

    random.seed(5)
    before = random.getstate()
    _pack(_texts(tmp_path, "abc", "def"), num_samples=1, seqlen=4)
    assert random.getstate() == before


def test_a_huge_document_is_not_tokenized_whole_for_a_few_windows(tmp_path: Path) -> None:
    path = tmp_path / "huge.txt"
    path.write_text("word " * 400_000)
    tokenizer = Letters()
    packed = pack_windows(read_texts(path), tokenizer, num_samples=2, seqlen=64)  # type: ignore[arg-type]
    assert packed.ids.shape == (2, 64)
    assert tokenizer.seen < 10_000
    assert packed.rows_cut == 1


def test_a_document_of_very_long_tokens_still_fills_the_windows(tmp_path: Path) -> None:
    class Thousands(Letters):
        def __call__(self, text: str, **settings: Any) -> dict[str, list[int]]:
            return {"input_ids": super().__call__(text, **settings)["input_ids"][::1000]}

    path = tmp_path / "spaces.txt"
    path.write_text("w" * 300_000)
    packed = pack_windows(read_texts(path), Thousands(), num_samples=2, seqlen=64)  # type: ignore[arg-type]
    assert packed.ids.shape == (2, 64)


def test_one_document_that_fills_every_window_is_pointed_out(tmp_path: Path) -> None:
    packed = _pack(_texts(tmp_path, "a" * 50, "b" * 50), num_samples=4, seqlen=8)
    assert any("one long document fills all 4 windows; 1 others were not needed" in w for w in packed.warnings)


@pytest.mark.parametrize(("num_samples", "seqlen"), [(0, 512), (1, 1)])
def test_settings_out_of_range_are_refused(tmp_path: Path, num_samples: int, seqlen: int) -> None:
    with pytest.raises(UserError, match="too few or too short windows"):
        _pack(_texts(tmp_path, "abc", "d"), num_samples=num_samples, seqlen=seqlen)


def test_data_of_a_single_token_are_refused(tmp_path: Path) -> None:
    class NoBos(Letters):
        def __call__(self, text: str, **settings: Any) -> dict[str, list[int]]:
            return {"input_ids": [ord(letter) for letter in text]}

    with pytest.raises(UserError, match="fewer than two tokens"):
        pack_windows(_texts(tmp_path, "a"), NoBos())  # type: ignore[arg-type]


def test_data_in_one_script_give_a_hint_and_a_mixed_set_gives_none(tmp_path: Path) -> None:
    """Field case O-32."""
    one = _pack(_texts(tmp_path, "only Latin letters", "and more of them"), num_samples=1, seqlen=8)
    mixed = _pack(_texts(tmp_path, "Latin letters", "中文汉字混合"), num_samples=2, seqlen=8)
    assert any("100.0% of the letters are LATIN" in warning for warning in one.warnings)
    assert not any("letters are" in warning for warning in mixed.warnings)
    assert set(mixed.scripts) == {"LATIN", "CJK"}


def test_a_long_document_does_not_hide_the_script_of_the_others() -> None:
    assert script_shares(["a" * 10_000_000, "我" * 4_000]) == {"CJK": 0.5, "LATIN": 0.5}
    assert script_shares(["a" * 4_000] * 60)["LATIN"] == 1.0
    assert hint_about_scripts(script_shares(["123 %"])) == []


def test_the_c4_sample_gives_128_windows_of_512_deterministically() -> None:
    texts = read_texts(shared("data/c4-sample/c4_en_sample.jsonl.gz"))
    tokenizer = load_tokenizer(shared("models/stories260k"))
    first, second = (pack_windows(texts, tokenizer) for _ in range(2))
    assert first.ids.shape == (128, 512)
    assert first.sha256 == second.sha256
    assert first.rows_in == 1480
    assert int((first.ids == tokenizer.bos_token_id).sum()) == first.rows_used
    assert not any("fill only" in warning for warning in first.warnings)
