"""The result as Markdown, for model cards and pull requests."""

from __future__ import annotations

from glm5_quant.eval.report_tables import all_tables
from glm5_quant.eval.result import EvalResult
from glm5_quant.eval.table import Table


def to_markdown(result: EvalResult, title: str = "Evaluation") -> str:
    """All tables under a heading, then findings, notes and what made them."""
    parts = [f"# {title}"]
    if result.status != "ok":
        parts.append("**The result is invalid: a model gave figures that are not finite.**")
    parts += [_draw(table) for table in all_tables(result)]
    findings = [f"- **{name}**: {found.message}" for name, found in result.all_findings]
    if findings:
        parts.append("## Findings\n\n" + "\n".join(findings))
    if result.notes:
        parts.append("## Notes\n\n" + "\n".join(f"- {note}" for note in result.notes))
    versions = ", ".join(f"{name} {number}" for name, number in result.versions.items())
    made = [
        f"source `{result.settings.source}`",
        versions,
        f"{result.seconds:.0f} s ({result.cpu_seconds:.0f} s of processor time)",
        f"schema {result.schema_version}",
    ]
    if result.command:
        made.insert(0, f"`{result.command}`")
    parts.append("Made by: " + "; ".join(filter(None, made)) + ".")
    return "\n\n".join(parts) + "\n"


def _draw(table: Table) -> str:
    lines = [_line(table.header), "|" + "---|" + "---:|" * (len(table.header) - 1), *map(_line, table.rows)]
    drawn = f"## {table.title}\n\n" + "\n".join(lines)
    return f"{drawn}\n\n{table.note}" if table.note else drawn


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
