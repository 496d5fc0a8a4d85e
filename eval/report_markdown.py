"""The result as Markdown, for model cards and pull requests."""

from __future__ import annotations

import re
from html import escape

from glm5_quant.eval.report_tables import all_tables
from glm5_quant.eval.result import EvalResult
from glm5_quant.eval.table import Table, one_line


def to_markdown(result: EvalResult, title: str = "Evaluation") -> str:
    """All tables under a heading, then findings, notes and what made them."""
    parts = [f"# {_text(title)}"]
    if result.status != "ok":
        parts.append("**The result is invalid: a model gave figures that are not finite.**")
    parts += [_draw(table) for table in all_tables(result)]
    findings = [f"- **{_text(name)}**: {_text(found.message)}" for name, found in result.all_findings]
    if findings:
        parts.append("## Findings\n\n" + "\n".join(findings))
    if result.notes:
        parts.append("## Notes\n\n" + "\n".join(f"- {_text(note)}" for note in result.notes))
    versions = ", ".join(f"{name} {number}" for name, number in result.versions.items())
    made = [
        f"source {_code(result.settings.source)}",
        versions,
        f"{result.seconds:.0f} s ({result.cpu_seconds:.0f} s of processor time)",
        f"schema {result.schema_version}",
    ]
    if result.command:
        made.insert(0, _code(result.command))
    parts.append("Made by: " + "; ".join(filter(None, made)) + ".")
    return "\n\n".join(parts) + "\n"


def _draw(table: Table) -> str:
    lines = [_line(table.header), "|" + "---|" + "---:|" * (len(table.header) - 1), *map(_line, table.rows)]
    drawn = f"## {table.title}\n\n" + "\n".join(lines)
    return f"{drawn}\n\n{_text(table.note)}" if table.note else drawn


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(_text(cell).replace("|", "\\|") for cell in cells) + " |"


def _text(text: str) -> str:
    """A text that Markdown shows as it is: `<s>`, the prefix of many models, is a tag to it that strikes out text."""
    return escape(one_line(text), quote=False)


def _code(text: str) -> str:
    """A text as code, between more backticks than it holds in a row."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    pad = " " if len(fence) > 1 else ""
    return f"{fence}{pad}{one_line(text)}{pad}{fence}"
