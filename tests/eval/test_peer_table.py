"""The table of results beside other quantizers."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "peers"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("table", FOLDER / "table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def scored(name: str, kl: float, counts: list[int]) -> dict[str, Any]:
    summary = {"kl": kl, "top1": 0.9, "perplexity": 2.0}
    return {
        "quantized": name,
        "stored_bytes": 1_000_000,
        "summary": summary | ({"numeric_read_kl": kl} if sum(counts) else {}),
        "per_window": {
            "kl": [kl] * len(counts),
            "numeric_read_kl_sum": [kl * count for count in counts],
            "numeric_read_count": counts,
        },
    }


@pytest.mark.parametrize(
    ("counts", "cells"),
    [
        ([3, 5, 4], ("0.1000", "0.500 [0.500, 0.500]")),
        ([3, 0, 0], ("0.1000", "-")),  # some draws of windows hold no numeric token
        ([0, 0, 0], ("-", "-")),
    ],
)
def test_too_few_numeric_tokens_are_a_dash_and_no_warning(
    script: ModuleType, counts: list[int], cells: tuple[str, str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lines = script.table([scored("ours", 0.1, counts), scored("rtn", 0.2, counts)], "rtn").splitlines()
    ours = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert (ours[4], ours[-1]) == cells
    assert ours[-2] == "0.500 [0.500, 0.500]"
    assert "nan" not in "\n".join(lines)


def test_a_baseline_without_divergence_is_a_dash_too(script: ModuleType) -> None:
    lines = script.table([scored("ours", 0.1, [3, 4]), scored("rtn", 0.0, [3, 4])], "rtn")
    assert "inf" not in lines and "nan" not in lines
    assert lines.splitlines()[-1].endswith("| - | - |")
