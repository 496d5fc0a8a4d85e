from __future__ import annotations

import errno
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support_paths import shared

from glm5_quant.model.errors import UserError
from glm5_quant.model.text_files import data_files
from glm5_quant.model.texts import Texts, read_texts


def _lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def _words(texts: Texts) -> list[str]:
    return [row.plain for row in texts.rows]


def test_a_text_file_is_one_document_plain_and_gzipped_alike(tmp_path: Path) -> None:
    plain, zipped = tmp_path / "a.txt", tmp_path / "b.txt.gz"
    plain.write_bytes("first\r\n\r\n第二行\n".encode())
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    assert _words(read_texts(plain)) == _words(read_texts(str(zipped))) == ["first\n\n第二行\n"]


def test_json_lines_keep_their_line_numbers_and_count_empty_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "  "}\n{"text": null}\n{"text": "two"}\n', encoding="utf-8")
    texts = read_texts(path)
    assert [(row.line, row.text) for row in texts.rows] == [(1, "one"), (5, "two")]
    assert (texts.rows_in, texts.rows_used, texts.rows_empty) == (4, 2, 2)
    assert "2 of 4 rows are empty" in texts.warnings[0]


def test_a_line_separator_inside_a_json_string_does_not_end_the_row(tmp_path: Path) -> None:
    path = _lines(tmp_path / "a.jsonl", {"text": "before\u2028after"}, {"text": "next"})
    assert _words(read_texts(path)) == ["before\u2028after", "next"]


@pytest.mark.parametrize(
    "content",
    [
        '[{"text": "one"}, {"text": "two"}]',
        '{"dev": [{"text": "one"}, {"text": "two"}]}',
        '["one", "two"]',
        '{"text": "one"}\n{"text": "two"}\n',
        '\ufeff[{"text": "one"}, {"text": "two"}]',
    ],
    ids=["list", "list below one key", "strings", "json lines called .json", "byte-order mark"],
)
def test_json_files_give_their_rows_in_every_common_shape(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content, encoding="utf-8")
    assert _words(read_texts(path)) == ["one", "two"]


def test_a_json_file_with_one_dialogue_is_one_row(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"messages": [{"role": "user", "content": "hi"}]}', encoding="utf-8")
    (row,) = read_texts(path).rows
    assert row.messages == ({"role": "user", "content": "hi"},)


def test_parquet_rows_come_out_plain_and_gzipped(tmp_path: Path) -> None:
    rows = [{"text": f"row {i}"} for i in range(600)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "b.parquet.gz").write_bytes(gzip.compress((tmp_path / "a.parquet").read_bytes()))
    for name in ("a.parquet", "b.parquet.gz"):
        texts = read_texts(tmp_path / name)
        assert [row.line for row in texts.rows] == list(range(1, 601))
        assert texts.rows[599].text == "row 599"


def test_parquet_messages_drop_the_null_keys_that_the_table_adds(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "hi", "name": None}, {"role": "tool", "content": "1", "name": "f"}]}
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (row,) = read_texts(tmp_path / "a.parquet").rows
    assert row.messages == ({"role": "user", "content": "hi"}, {"role": "tool", "content": "1", "name": "f"})


def test_messages_turns_and_conversations_become_the_same_dialogue(tmp_path: Path) -> None:
    path = _lines(
        tmp_path / "a.jsonl",
        {"messages": [{"role": "user", "content": "问"}, {"role": "assistant", "content": "答"}]},
        {"turns": [{"role": "user", "text": "问"}, {"role": "assistant", "text": "答"}]},
        {"conversations": [{"from": "human", "value": "问"}, {"from": "gpt", "value": "答"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "问"}]},
                {"role": "assistant", "content": "答"},
            ]
        },
    )
    dialogues = []
    for row in read_texts(path).rows:
        assert row.messages is not None
        dialogues.append([(message["role"], message["content"]) for message in row.messages])
    assert dialogues == [[("user", "问"), ("assistant", "答")]] * 4


def test_a_row_with_an_empty_text_and_a_dialogue_gives_the_dialogue(tmp_path: Path) -> None:
    """A table of texts and dialogues together has both columns in every row."""
    chat = [{"role": "user", "content": "hi"}]
    rows = [{"text": "a", "messages": None}, {"text": None, "messages": chat}, {"text": "", "messages": chat}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for path in (tmp_path / "a.parquet", _lines(tmp_path / "a.jsonl", *rows)):
        texts = read_texts(path)
        assert [(row.text, row.messages) for row in texts.rows] == [("a", None), *[(None, tuple(chat))] * 2]
        assert (texts.rows_empty, texts.warnings) == (0, ())


def test_a_tool_call_needs_no_content(tmp_path: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": None}}}]}
    (row,) = read_texts(_lines(tmp_path / "a.jsonl", {"messages": [call]})).rows
    assert row.messages == ({**call, "content": ""},)  # the model itself said null: it stays


def test_arguments_of_other_tools_that_a_table_adds_as_nulls_are_dropped(tmp_path: Path) -> None:
    calls = [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": [2]}}]
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": call} for call in calls]}
    pq.write_table(pa.Table.from_pylist([{"messages": [message]}]), tmp_path / "a.parquet")
    (row,) = read_texts(tmp_path / "a.parquet").rows
    assert row.messages == ({**message, "content": ""},)


def test_a_dialogue_as_json_inside_a_string_is_a_dialogue(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    path = _lines(tmp_path / "a.jsonl", {"messages": json.dumps(chat)}, {"text": "[{1}]"}, {"turns": "[{no JSON"})
    assert [row.messages or row.text for row in read_texts(path).rows] == [tuple(chat), "[{1}]", "[{no JSON"]


def test_dates_beside_the_text_do_not_matter(tmp_path: Path) -> None:
    """A time zone that this machine does not know, and the year 148107."""
    columns = {
        "text": ["a", "b"],
        "zone": pa.array([1, 2], pa.timestamp("us", tz="Europe/Nowhere")),
        "far": pa.array([2**62, 2], pa.timestamp("us")),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert _words(read_texts(tmp_path / "a.parquet")) == ["a", "b"]


def test_turns_of_named_speakers_become_a_transcript(tmp_path: Path) -> None:
    path = _lines(
        tmp_path / "a.jsonl", {"turns": [{"speaker": "MATT", "text": "Hello."}, {"speaker": "SAM", "text": "Hi."}]}
    )
    assert read_texts(path).rows[0].text == "MATT: Hello.\nSAM: Hi."


def test_a_folder_is_read_in_name_order_without_readme_and_hidden_files(tmp_path: Path) -> None:
    """Field case O-41: the order in which a disk lists files decides nothing."""
    for name in ("b.txt", "a.txt", "README.md", ".hidden.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "sub").mkdir()
    _lines(tmp_path / "sub" / "c.jsonl", {"text": "c"})
    texts = read_texts(tmp_path)
    assert _words(texts) == ["a.txt", "b.txt", "c"]
    assert [Path(file).name for file in texts.files] == ["a.txt", "b.txt", "c.jsonl"]


def test_a_folder_laid_out_by_splits_gives_only_the_split_asked_for(tmp_path: Path) -> None:
    for name in ("train-00000.txt", "test-00000.txt", "valid.txt"):
        (tmp_path / name).write_text(name)
    assert _words(read_texts(tmp_path)) == ["train-00000.txt"]
    assert _words(read_texts(tmp_path, split="test")) == ["test-00000.txt"]
    assert _words(read_texts(tmp_path, split="validation")) == ["valid.txt"]


def test_files_that_are_left_out_for_the_split_are_warned_about(tmp_path: Path) -> None:
    for name in ("en", "zh", "de", "train-extra"):
        _lines(tmp_path / f"{name}.jsonl", {"text": name}, {"text": name})
    texts = read_texts(tmp_path)
    assert _words(texts) == ["train-extra"] * 2
    assert texts.warnings == (f"{tmp_path}: 1 of 4 files read: those named train: train-extra.jsonl",)
    assert read_texts(tmp_path, split="test").warnings == ()
    for number in range(7):
        (tmp_path / f"train-{number}.txt").write_text("x")
    assert read_texts(tmp_path).warnings[0].endswith("train-3.txt, train-4.txt, and 3 more")


def test_a_folder_of_other_splits_is_read_with_a_warning(tmp_path: Path) -> None:
    for name in ("train", "validation"):
        _lines(tmp_path / f"{name}.jsonl", {"text": name})
    texts = read_texts(tmp_path, split="test")
    assert _words(texts) == ["train", "validation"]
    said = "no file is named test: all of them were read, which are named train, validation"
    assert texts.warnings == (f"{tmp_path}: {said}",)


def test_files_of_kinds_that_are_not_read_are_warned_about(tmp_path: Path) -> None:
    for name in ("a.txt", "b.jsonl.zst", "c.csv", "d.csv.gz", "LICENSE", "README.md"):
        (tmp_path / name).write_text("x")
    texts = read_texts(tmp_path)
    assert _words(texts) == ["x"]
    assert texts.warnings == (f"{tmp_path}: 3 files of kinds that are not read: b.jsonl.zst, c.csv, d.csv.gz",)


def test_descriptions_of_a_data_set_are_no_data(tmp_path: Path) -> None:
    for name in ("dataset_infos.json", "dataset_info.json", "state.json"):
        (tmp_path / name).write_text('{"citation": "", "features": {}}')
    (tmp_path / "data-00000-of-00001.arrow").write_bytes(b"x")
    with pytest.raises(UserError, match=r"no data file in this folder; found data-00000-of-00001\.arrow"):
        read_texts(tmp_path)
    _lines(tmp_path / "a.jsonl", {"text": "a"})
    assert _words(read_texts(tmp_path)) == ["a"]


def test_a_folder_of_thousands_of_folders_is_listed_in_seconds(tmp_path: Path) -> None:
    for number in range(3000):
        (tmp_path / f"{number:04d}").mkdir()
        (tmp_path / f"{number:04d}.txt").touch()
    start = time.process_time()
    assert len(data_files(tmp_path)) == 3000
    assert time.process_time() - start < 2  # 4 s where each name is looked up in a list


@pytest.mark.parametrize(
    "name", ["train.jsonl", "Train-00000-of-00003.jsonl", "zh_train.jsonl", "my train.jsonl", "data-train/a.jsonl"]
)
def test_a_split_is_a_word_of_the_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    _lines(tmp_path / name, {"text": "yes"})
    _lines(tmp_path / "trainer.jsonl", {"text": "no"})
    assert _words(read_texts(tmp_path)) == ["yes"]


def test_linked_folders_are_followed_once_and_never_in_circles(tmp_path: Path) -> None:
    data, far = tmp_path / "data", tmp_path / "far"
    (data / "sub").mkdir(parents=True)
    far.mkdir()
    (data / "sub" / "b.txt").write_text("b")
    (far / "c.txt").write_text("c")
    (data / "far").symlink_to(far)
    (data / "again").symlink_to(data / "sub")
    (data / "sub" / "up").symlink_to(data)
    (far / "self").symlink_to(far)
    assert _words(read_texts(data)) == ["c", "b"]


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=r"b\.txt: cannot be read; found No such file"):
        read_texts(tmp_path)


def test_a_folder_that_may_not_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("a")
    iterdir = Path.iterdir

    def refuse(path: Path) -> Iterator[Path]:
        if path.name == "closed":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(UserError, match=r"closed: this folder cannot be read; found Permission denied"):
        read_texts(tmp_path)


def test_limit_stops_after_that_many_usable_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ""}\n{"text": "one"}\n{"text": "two"}\nnot json\n')
    texts = read_texts(path, limit=2)
    assert _words(texts) == ["one", "two"]
    assert "only the first 2 usable rows were read" in texts.warnings[-1]
    with pytest.raises(UserError, match="limit must be at least 1"):
        read_texts(path, limit=0)


def test_a_named_column_is_read_instead_of_the_usual_ones(tmp_path: Path) -> None:
    path = _lines(tmp_path / "a.jsonl", {"text": "no", "body": "yes"})
    assert _words(read_texts(path, column="body")) == ["yes"]


def test_one_usable_row_works_and_is_warned_about(tmp_path: Path) -> None:
    """Field case O-29."""
    texts = read_texts(_lines(tmp_path / "a.jsonl", {"text": "alone"}))
    assert texts.rows_used == 1
    assert "only one usable row" in texts.warnings[0]


def test_a_wrong_column_names_file_row_columns_found_and_expected(tmp_path: Path) -> None:
    """Field case O-29."""
    path = _lines(tmp_path / "a.jsonl", {"TEXT": "x", "id": 1})
    with pytest.raises(UserError) as caught:
        read_texts(path)
    message = str(caught.value)
    for part in ("a.jsonl", "row 1", "TEXT, id", "text or messages", 'Rename the column "TEXT" to "text"'):
        assert part in message
    with pytest.raises(UserError, match="no such column; found columns TEXT, id; expected body"):
        read_texts(path, column="body")


BAD_FILES = {
    "an empty file": ("a.jsonl", b"", "no usable rows; found nothing: it is empty"),
    "an empty json file": ("a.json", b"", "no usable rows"),
    "an empty text file": ("a.txt", b"", "no usable rows; found 1 rows, all of them empty"),
    "only empty rows": ("a.jsonl", b'{"text": ""}\n{"text": " "}\n', "found 2 rows, all of them empty"),
    "empty messages": ("a.jsonl", b'{"messages": []}\n', "no usable rows"),
    "broken JSON": ("a.jsonl", b'{"text": "a"}\n{"text": \n', "line 2: not JSON"),
    "unclosed JSON": ("a.jsonl", b'{"text": "a\n', "Invalid control character at column 12"),
    "broken JSON list": ("a.json", b'[{"text": "a"},\n{]', "line 2: not JSON"),
    "another encoding": ("a.txt", "Käse".encode("latin-1"), "not UTF-8 text; found byte 0xe4"),
    "a binary file": ("a.txt", b"ab\0cd", "holds zero bytes"),
    "a cut gzip stream": ("a.txt.gz", gzip.compress(b"hello " * 1000)[:-20], "gzip stream is damaged or cut short"),
    "a false gzip file": ("a.txt.gz", b"hello", "gzip stream is damaged or cut short"),
    "an unknown kind": ("a.csv", b"text\nx\n", "this kind of file is not read; found .csv; expected .json"),
    "a false parquet file": ("a.parquet", b"hello, hello, hello", "not a readable parquet file"),
    "a number for a text": ("a.jsonl", b'{"text": 5}\n', "row 1: neither text nor messages; found int"),
    "a message without role": (
        "a.jsonl",
        b'{"messages": [{"content": "x"}]}\n',
        "row 1: not a message; found keys content",
    ),
    "turns that are bare strings": ("a.jsonl", b'{"turns": ["x", "y"]}\n', "not a message; found str"),
    "an image in a message": (
        "a.jsonl",
        b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}\n',
        "message content is no text; found list",
    ),
    "deeply nested lines": ("a.jsonl", b'{"text": "a"}\n' + b"[" * 200_000, "line 2: JSON nested too deeply"),
    "deeply nested JSON": ("a.json", b"[" * 200_000, "JSON nested too deeply"),
    "a number of 5,000 digits": ("a.jsonl", b'{"text": "a", "id": ' + b"1" * 5000 + b"}", "line 1: a number too long"),
    "the same in a list": ("a.json", b'[{"text": "a", "id": ' + b"1" * 5000 + b"}]", "a number too long to read"),
    "half a character": ("a.jsonl", b'{"text": "a \\ud83d b"}\n', r"row 1: half a character"),
    "half a character in a message": (
        "a.jsonl",
        b'{"messages": [{"role": "user", "content": "\\ud83d"}]}\n',
        r"without its other half; found \ud83d",
    ),
    "a row without columns": ("a.jsonl", b"{}\n", "found a row without columns"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_unreadable_data_give_one_message_that_names_the_file(tmp_path: Path, case: str) -> None:
    """Field case O-29 and its kind."""
    name, content, message = BAD_FILES[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_texts(tmp_path / name)
    assert message in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    "source",
    ["", "missing.jsonl", "./missing", "/no/such/folder", "data/c4.jsonl.gz", "missing.txt", "wiki.test.raw"],
)
def test_a_missing_path_is_said_to_be_missing(source: str) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        read_texts(source)


def test_a_text_in_the_place_of_a_path_is_one_short_message() -> None:
    with pytest.raises(UserError, match="cannot be read; found File name too long") as caught:
        read_texts("a long text " * 1000)
    assert len(str(caught.value)) < 300


def test_a_folder_without_data_files_says_what_it_found(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"no data file in this folder; found model\.safetensors; expected \.txt"):
        read_texts(tmp_path)


def test_a_file_without_read_permission_is_reported_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.symlink_to(tmp_path / "b.txt")
    (tmp_path / "b.txt").mkdir()
    (tmp_path / "b.txt" / "c.txt").write_text("x")
    assert read_texts(path).rows_used == 1  # a link to a folder is that folder
    loop = tmp_path / "loop.txt"
    loop.symlink_to(loop)
    with pytest.raises(UserError, match=r"loop\.txt"):
        read_texts(loop)


def test_the_home_of_nobody_is_a_message() -> None:
    with pytest.raises(UserError, match="~nosuchuser is nobody's home folder"):
        read_texts("~nosuchuser/data.jsonl")


def test_a_hub_data_set_that_cannot_be_fetched_gives_one_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def offline(*args: object, **kwargs: object) -> object:
        raise ConnectionError("Couldn't reach 'owner/data' on the Hub\nlong tail")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(UserError) as caught:
        read_texts("owner/data")
    assert "owner/data: neither a path here nor a data set that could be fetched (split train)" in str(caught.value)
    assert "pass the folder" in str(caught.value)
    assert "long tail" not in str(caught.value)


def test_a_hub_data_set_gives_its_rows_with_config_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load(repo: str, config: str | None, *, split: str) -> list[dict[str, str]]:
        asked.append((repo, config, split))
        return [{"text": "one"}, {"text": ""}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    texts = read_texts("owner/data:raw-v1", split="test")
    assert _words(texts) == ["one"]
    assert asked == [("owner/data", "raw-v1", "test")]


def test_chinese_json_lines_are_read_as_utf8_in_the_c_locale(tmp_path: Path) -> None:
    """Field case O-32."""
    path = _lines(tmp_path / "a.jsonl", {"text": "下限不低于 5%"})
    code = f"from glm5_quant.model.texts import read_texts; print(ascii(read_texts({str(path)!r}).rows[0].text))"
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    shown = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == ascii("下限不低于 5%")


@pytest.mark.parametrize(
    ("relative", "rows"),
    [
        ("data/c4-sample/c4_en_sample.jsonl.gz", 1480),
        ("data/zh-wiki-cmrc2018/cmrc2018_dev_paragraphs.jsonl.gz", 848),
        ("data/wikitext2/wiki.test.raw.gz", 1),
        ("data/dialogs/long_sessions_200plus.jsonl.gz", 35),
        ("data/dialogs/crd3_4_episodes.jsonl.gz", 4),
        ("data/dialogs/sgd_banks_payment.jsonl.gz", 1010),
    ],
)
def test_the_real_data_sets_are_read_whole(relative: str, rows: int) -> None:
    assert read_texts(shared(relative)).rows_used == rows
