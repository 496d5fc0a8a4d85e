"""The four stress shapes, made of the user's own texts: what long-context users saw break first.

- lookup: a long document of several texts with records strewn in ("The reference number of A is 48213."), and at the
  end a question for one of them with its answer: a copied number after a long distance.
- multi-hop: records that point to one another, and a question that needs two of them.
- noise: the text with stray characters inserted, as from scans and pasted tables.
- mixed: a short text, a long one and a short one again in one document.

Each shape is a document with its true continuation, so all figures of the text part hold for it, by slice
"stress:NAME".
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from glm5_quant.eval.documents import Document

NOISE = "~^*#|¤§¬•·_=+<>\\"
NOISE_SHARE = 0.03
MOST_TEXTS = 64


@dataclass(frozen=True, kw_only=True)
class Wording:
    """Sentences of one language: a record, a link between records, and the questions."""

    record: str
    link: str
    ask: str
    ask_twice: str
    names: tuple[str, ...]


ENGLISH = Wording(
    record="The reference number of {name} is {number}.",
    link="The account of {other} is managed by {name}.",
    ask="Question: What is the reference number of {name}? Answer: {number}",
    ask_twice="Question: What is the reference number of the manager of {other}? Answer: {name}, {number}",
    names=("Harbour", "Juniper", "Meridian", "Sable", "Tundra", "Willow", "Quarry", "Linden"),
)
CHINESE = Wording(
    record="{name}的编号是{number}。",
    link="{other}的账户由{name}管理。",
    ask="问：{name}的编号是多少？答：{number}",
    ask_twice="问：{other}的账户管理人的编号是多少？答：{name}，{number}",
    names=("海港", "松林", "子午", "紫貂", "苔原", "柳溪", "石场", "椴树"),
)


def stress_documents(documents: Iterable[Document], seed: int) -> Iterator[Document]:
    """One document of each shape per four texts, from the first 64 texts; the same seed gives the same documents."""
    generator = random.Random(seed)
    group: list[Document] = []
    for count, document in enumerate(documents):
        if count >= MOST_TEXTS:
            break
        if isinstance(document.text, str) and document.text.strip():
            group.append(document)
        if len(group) == 4:
            yield from _shapes(group, generator)
            group = []
    if group:
        yield from _shapes(group, generator)


def _shapes(group: list[Document], generator: random.Random) -> Iterator[Document]:
    texts = [str(document.text) for document in group]
    first = group[0]
    wording = CHINESE if first.language == "zh" else ENGLISH
    for name, shape in SHAPES.items():
        text = shape(texts, wording, generator)
        yield Document(text=text, file=first.file, language=first.language, kind=name)


def lookup(texts: list[str], wording: Wording, generator: random.Random) -> str:
    """Records strewn over all texts, then a question for one of them."""
    numbers = _numbers(wording, generator)
    records = [wording.record.format(name=name, number=number) for name, number in numbers.items()]
    name = generator.choice(list(numbers))
    return _strewn(texts, records, generator) + "\n" + wording.ask.format(name=name, number=numbers[name])


def multi_hop(texts: list[str], wording: Wording, generator: random.Random) -> str:
    """Records and links strewn over all texts, then a question that needs one of each."""
    numbers = _numbers(wording, generator)
    name, other = generator.sample(list(numbers), 2)
    records = [wording.record.format(name=key, number=number) for key, number in numbers.items()]
    records.append(wording.link.format(name=name, other=other))
    question = wording.ask_twice.format(name=name, other=other, number=numbers[name])
    return _strewn(texts, records, generator) + "\n" + question


def noise(texts: list[str], wording: Wording, generator: random.Random) -> str:
    """The first text with a stray character before 3% of its characters."""
    return "".join(
        generator.choice(NOISE) + character if generator.random() < NOISE_SHARE else character for character in texts[0]
    )


def mixed(texts: list[str], wording: Wording, generator: random.Random) -> str:
    """A short text, all texts in a row, a short text again."""
    short = [text.strip()[:60] for text in (texts[0], texts[-1])]
    return f"{short[0]}\n\n" + "\n".join(texts) + f"\n\n{short[1]}"


def _numbers(wording: Wording, generator: random.Random) -> dict[str, int]:
    return {name: generator.randrange(10_000, 1_000_000) for name in generator.sample(wording.names, 5)}


def _strewn(texts: list[str], records: list[str], generator: random.Random) -> str:
    """Records put between the paragraphs of all texts, in random order and at random places."""
    paragraphs = [line for text in texts for line in text.splitlines() if line.strip()]
    generator.shuffle(records)
    for record in records:
        paragraphs.insert(generator.randint(0, len(paragraphs)), record)
    return "\n".join(paragraphs)


SHAPES: dict[str, Callable[[list[str], Wording, random.Random], str]] = {
    "lookup": lookup,
    "multi-hop": multi_hop,
    "noise": noise,
    "mixed": mixed,
}
