"""Tokenizers: load one from a model folder without running its code, and turn a document into ids with one prefix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm5_quant.model.errors import UserError
from glm5_quant.model.files import expanded
from glm5_quant.model.text_files import check_characters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from glm5_quant.model.texts import Text

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "spiece.model")

SAMPLES = ("a", "A", "0")
"""Texts tried to see what a tokenizer puts around one: a small vocabulary, of DNA say, gives no token for some."""


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder; Python files in the folder are never run.

    Model types that `transformers` does not know are served by their tokenizer.json alone.
    Raises UserError if the folder has no tokenizer or it cannot be read.
    """
    import transformers

    path = expanded(folder)
    if not path.is_dir():
        raise UserError("no such folder", file=path, expected="a model folder with a tokenizer")
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise UserError("no tokenizer in this folder", file=path, expected=" or ".join(_TOKENIZER_FILES))
    # Asked about a model type it does not know, AutoTokenizer warns at length and then does what the second one does.
    ways = [transformers.AutoTokenizer] if _knows_type_of(path) else []
    if (path / "tokenizer.json").is_file():
        ways.append(transformers.PreTrainedTokenizerFast)
    failure: Exception | None = None
    for way in ways or [transformers.AutoTokenizer]:
        try:
            return _quiet(way.from_pretrained(path, trust_remote_code=False, local_files_only=True))
        except Exception as error:
            failure = error
    found = f"{type(failure).__name__}: {(str(failure).strip().splitlines() or [''])[0]}"
    raise UserError("the tokenizer cannot be loaded", file=path, found=found) from failure


def _knows_type_of(folder: Path) -> bool:
    """Whether `transformers` itself has the model type of a folder's config.json, or there is none to ask about."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return not isinstance(config, dict) or config.get("model_type") in CONFIG_MAPPING_NAMES


def _quiet(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Whole documents are tokenized and then cut into windows: that they exceed the model's length is no news."""
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def affixes(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Ids that the tokenizer itself puts before and after a plain text: BOS, `[gMASK]<sop>`, EOS, or nothing."""
    for sample in SAMPLES:
        bare = tokenizer(sample, add_special_tokens=False, verbose=False)["input_ids"]
        full = tokenizer(sample, verbose=False)["input_ids"]
        if bare:
            break
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return list(full[:start]), list(full[start + len(bare) :])
    return [], []


def decoded_vocabulary(tokenizer: Any) -> dict[int, str]:
    """Text of every vocabulary id but the special ones, decoded alone."""
    special = set(tokenizer.all_special_ids)
    ids = sorted(set(tokenizer.get_vocab().values()) - special)
    texts = tokenizer.batch_decode([[token] for token in ids], clean_up_tokenization_spaces=False)
    return dict(zip(ids, texts, strict=True))


def encode(tokenizer: PreTrainedTokenizerBase, document: Text) -> list[int]:
    """Ids of one document: the tokenizer's own prefix exactly once, then the text or the rendered messages.

    A template (or a text that was rendered earlier) may write the prefix itself; it is then not added a second time.
    Plain texts also get the tokenizer's own suffix; rendered messages end as the template ends them.
    Raises UserError naming file and row if messages meet a tokenizer without a usable chat template, or if the text
    holds half a character.
    """
    prefix, suffix = affixes(tokenizer)
    text = document.text if document.messages is None else _render(tokenizer, document)
    check_characters(text or "", document.file, document.where)
    ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    if document.messages is not None or (suffix and ids[-len(suffix) :] == suffix):
        suffix = []
    return ids + suffix if ids[: len(prefix)] == prefix else prefix + ids + suffix


def _render(tokenizer: PreTrainedTokenizerBase, document: Text) -> str:
    if not tokenizer.chat_template:
        raise UserError(
            "the row holds messages, but the tokenizer has no chat template",
            file=document.file,
            item=document.where,
            expected="a text column, or a tokenizer with chat_template",
            hint="Render the messages to text beforehand, or add chat_template.jinja to the model folder",
        )
    try:
        return str(tokenizer.apply_chat_template([dict(m) for m in document.messages or ()], tokenize=False))
    except Exception as error:  # a template is a program: it may raise anything
        raise UserError(
            "the chat template refuses these messages", file=document.file, item=document.where, found=str(error)
        ) from error
