"""Perplexity, divergence, drift over long dialogues, number errors, and the report.

    from glm5_quant.eval import evaluate
    result = evaluate("source-folder", ["export-folder"], "texts.jsonl", num_windows=24)

Names are imported when first used, so that `import glm5_quant.eval` loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm5_quant.eval.config import EvalConfig
    from glm5_quant.eval.report_html import to_html
    from glm5_quant.eval.report_json import to_json, traces_json
    from glm5_quant.eval.report_markdown import to_markdown
    from glm5_quant.eval.report_table import to_table
    from glm5_quant.eval.result import EvalResult
    from glm5_quant.eval.run import evaluate

_HOMES = {
    "EvalConfig": "config",
    "EvalResult": "result",
    "evaluate": "run",
    "to_html": "report_html",
    "to_json": "report_json",
    "to_markdown": "report_markdown",
    "to_table": "report_table",
    "traces_json": "report_json",
}

__all__ = ["EvalConfig", "EvalResult", "evaluate", "to_html", "to_json", "to_markdown", "to_table", "traces_json"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
