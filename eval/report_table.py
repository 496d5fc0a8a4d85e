"""The result as text for a terminal."""

from __future__ import annotations

from glm5_quant.eval.report_tables import all_tables
from glm5_quant.eval.result import EvalResult
from glm5_quant.eval.table import Table, one_line


def to_table(result: EvalResult) -> str:
    """All tables with aligned columns, then findings and notes."""
    parts = [_draw(table) for table in all_tables(result)]
    if result.invalid is not None:
        bad = result.invalid
        where = f"document {bad.document}, position {bad.position}"
        parts.insert(0, one_line(f"INVALID: {bad.model}: {bad.reason} at {where}"))
    parts += [one_line(f"{name}: {found.message}") for name, found in result.all_findings]
    parts += [one_line(f"note: {note}") for note in result.notes]
    return "\n\n".join(parts) + "\n"


def _draw(table: Table) -> str:
    lines = [tuple(map(one_line, line)) for line in (table.header, *table.rows)]
    widths = [max(_width(line[column]) for line in lines) for column in range(len(table.header))]
    drawn = [table.title]
    for number, line in enumerate(lines):
        cells = [
            _pad(cell, width, left=column == 0) for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        drawn.append("  " + "  ".join(cells).rstrip())
        if number == 0:
            drawn.append("  " + "  ".join("-" * width for width in widths))
    if table.note:
        drawn.append(f"  {one_line(table.note)}")
    return "\n".join(drawn)


def _width(text: str) -> int:
    return sum(2 if ord(character) > 0x2E7F else 1 for character in text)


def _pad(text: str, width: int, left: bool) -> str:
    space = " " * (width - _width(text))
    return text + space if left else space + text
