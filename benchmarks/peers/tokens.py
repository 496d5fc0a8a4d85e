"""Write the calibration and evaluation tokens once, so that every peer and every score reads the same ones.

    python benchmarks/peers/tokens.py --model MODEL --calibration C4.jsonl.gz --evaluation WIKI.raw.gz --out OUT

Calibration documents (jsonl with `text` or `messages`, or plain text as one document) are tokenised in order and joined
without a separator; the first `--calibration-windows` windows are kept. The evaluation text is tokenised whole, as one
string; the first `--evaluation-windows` windows are kept. With `--own-corpus` both come from one text: evaluation is
its last windows, calibration its first ones (the setting for the TinyStories models, whose corpus is small).
"""

import argparse
import gzip
import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer


def read_documents(path: Path, tokenizer) -> list[str]:
    """Every document of a jsonl file (`text`, or `messages` through the chat template), or a text file as one document;
    gzip where the name says so."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", newline="") as handle:
        content = handle.read()
    if ".jsonl" in path.name:
        rows = [json.loads(line) for line in content.split("\n") if line.strip()]
        return [row["text"] if "text" in row else chat(tokenizer, row["messages"]) for row in rows]
    return [content]


def chat(tokenizer, messages: list[dict[str, str]]) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False)


def windows(ids: list[int], count: int, length: int, *, last: bool = False) -> torch.Tensor:
    """`count` windows [count, length] int64 from the start (or the end) of `ids`; too few tokens are an error."""
    if len(ids) < count * length:
        raise ValueError(f"{len(ids)} tokens do not fill {count} windows of {length}")
    kept = ids[len(ids) - count * length :] if last else ids[: count * length]
    return torch.tensor(kept, dtype=torch.int64).view(count, length)


def tokenise(tokenizer, documents: list[str], enough: int | None = None) -> list[int]:
    """Ids of the documents one after another, no separator; stops once there are `enough`."""
    ids: list[int] = []
    for document in documents:
        ids += tokenizer(document)["input_ids"]
        if enough is not None and len(ids) >= enough:
            break
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder whose tokenizer is used")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--evaluation", type=Path, help="not needed with --own-corpus")
    parser.add_argument("--own-corpus", action="store_true", help="evaluate on the end of the calibration text")
    parser.add_argument("--calibration-windows", type=int, default=128)
    parser.add_argument("--evaluation-windows", type=int, default=24)
    parser.add_argument("--length", type=int, default=512, help="tokens in a window")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text-out", type=Path, help="also write the calibration text, as one document of a jsonl")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    needed = args.calibration_windows * args.length
    documents = read_documents(args.calibration, tokenizer)
    if args.own_corpus:
        ids = tokenise(tokenizer, documents)
        evaluation = windows(ids, args.evaluation_windows, args.length, last=True)
        calibration = windows(ids[: -evaluation.numel()], args.calibration_windows, args.length)
    else:
        calibration = windows(tokenise(tokenizer, documents, needed), args.calibration_windows, args.length)
        whole = "".join(read_documents(args.evaluation, tokenizer))
        evaluation = windows(tokenise(tokenizer, [whole]), args.evaluation_windows, args.length)
    if args.text_out:
        # One document for all, so that a tool which draws documents in an order of its own still reads these tokens (up
        # to the few that merge where two documents meet).
        used, kept = 0, []
        for document in documents:
            if used > needed + args.length:
                break
            kept.append(document)
            used += len(tokenizer(document)["input_ids"])
        args.text_out.write_text(json.dumps({"text": "".join(kept)}) + "\n")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save_file({"calibration": calibration, "evaluation": evaluation}, args.out)
    for name, ids in (("calibration", calibration), ("evaluation", evaluation)):
        print(name, tuple(ids.shape), "sha256", hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:16])


if __name__ == "__main__":
    main()
