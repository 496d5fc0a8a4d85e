from __future__ import annotations

import re

from glm5_quant.eval.documents import Document
from glm5_quant.eval.stress import stress_documents

TEXTS = [Document(text=f"Paragraph {i} one.\nParagraph {i} two.", file="a.txt", language="en") for i in range(6)]


def test_each_shape_is_made_of_the_texts_and_ends_with_its_true_answer() -> None:
    found = {(d.kind, i // 4): str(d.text) for i, d in enumerate(stress_documents(TEXTS, 0))}
    assert {kind for kind, _ in found} == {"lookup", "multi-hop", "noise", "mixed"}
    question = re.search(r"What is the reference number of (\w+)\? Answer: (\d+)$", found["lookup", 0])
    assert question is not None
    assert f"The reference number of {question[1]} is {question[2]}." in found["lookup", 0]
    hop = re.search(r"manager of (\w+)\? Answer: (\w+), (\d+)$", found["multi-hop", 0])
    assert hop is not None
    assert f"The account of {hop[1]} is managed by {hop[2]}." in found["multi-hop", 0]
    assert f"The reference number of {hop[2]} is {hop[3]}." in found["multi-hop", 0]
    assert all(f"Paragraph {i} two." in found["lookup", 0] for i in range(4))
    assert found["mixed", 0].startswith("Paragraph 0") and found["mixed", 0].endswith("Paragraph 3 two.")


def test_noise_only_inserts_characters_and_the_seed_decides_everything() -> None:
    text = "The balance is 48,213.50 and nothing else. " * 40
    documents = [Document(text=text, language="en")]
    noisy = next(d for d in stress_documents(documents, 1) if d.kind == "noise").text
    rest = iter(str(noisy))
    assert all(character in rest for character in text)
    assert 0.01 < (len(noisy) - len(text)) / len(text) < 0.06
    assert list(stress_documents(documents, 1)) == list(stress_documents(documents, 1))
    assert list(stress_documents(documents, 1)) != list(stress_documents(documents, 2))


def test_chinese_texts_get_chinese_records() -> None:
    found = [str(d.text) for d in stress_documents([Document(text="第一段。\n第二段。", language="zh")], 0)]
    assert "的编号是" in found[0] and "答：" in found[1]
