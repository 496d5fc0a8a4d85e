"""Which writing systems sample data hold: a model calibrated on one of them gets worse in the others."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable

_SAMPLE_CHARACTERS = 200_000
_ONE_SCRIPT = 0.99


def script_shares(texts: Iterable[str]) -> dict[str, float]:
    """Share of each writing system among the letters, largest first; looks at the first 200,000 characters.

    The writing system is the first word of the letter's Unicode name: LATIN, CJK, CYRILLIC, HANGUL, ARABIC, ...
    """
    counts: Counter[str] = Counter()
    left = _SAMPLE_CHARACTERS
    for text in texts:
        if left <= 0:
            break
        # Each document gives a slice, so that a long one does not hide the others.
        piece = text[: min(left, 4_000)]
        left -= len(piece)
        counts.update(piece)
    scripts: Counter[str] = Counter()
    for letter, count in counts.items():
        if letter.isalpha():
            scripts[unicodedata.name(letter, "UNKNOWN").split()[0]] += count
    total = sum(scripts.values())
    return {name: count / total for name, count in sorted(scripts.items(), key=lambda item: (-item[1], item[0]))}


def hint_about_scripts(shares: dict[str, float]) -> list[str]:
    """A hint if nearly all letters are of one writing system; none where there are no letters."""
    if not shares:
        return []
    script, share = next(iter(shares.items()))
    if share < _ONE_SCRIPT:
        return []
    return [
        f"{share:.1%} of the letters are {script}: if the model serves other languages, mix texts of them in, "
        "because calibration in one language makes the others worse"
    ]
