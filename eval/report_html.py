"""The result as one HTML file: no scripts, nothing fetched, made for a phone, a desk and a printer."""

from __future__ import annotations

from html import escape
from pathlib import Path

from glm5_quant.eval.report_plots import charts
from glm5_quant.eval.report_tables import agreement, all_tables, packed_linears
from glm5_quant.eval.result import EvalResult, ExportResult
from glm5_quant.eval.table import INTERVALS, Table, number, with_interval

STYLE = """
:root{--ink:#1b1f24;--soft:#57606a;--line:#d0d7de;--wash:#f6f8fa;--good:#1a7f37;--bad:#b3261e}
*{box-sizing:border-box}
body{margin:0 auto;max-width:60rem;padding:1rem;color:var(--ink);background:#fff;
 font:16px/1.5 system-ui,-apple-system,"Segoe UI","Noto Sans","PingFang SC","Microsoft YaHei",sans-serif}
h1{font-size:1.6rem;line-height:1.2;margin:.5rem 0;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:2rem 0 .4rem;border-bottom:1px solid var(--line);padding-bottom:.2rem}
p{margin:.4rem 0}
.note{color:var(--soft);font-size:.86rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(16rem,1fr));gap:.8rem;margin:1rem 0}
.card{border:1px solid var(--line);border-left:5px solid var(--soft);border-radius:6px;padding:.7rem .9rem;
 background:var(--wash);overflow-wrap:anywhere}
.card.good{border-left-color:var(--good)}.card.bad{border-left-color:var(--bad)}
.card h3{margin:0 0 .3rem;font-size:1rem}
.card dl{display:grid;grid-template-columns:1fr auto;gap:.1rem .8rem;margin:0;font-size:.92rem}
.card dd{margin:0;text-align:right;font-variant-numeric:tabular-nums}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,27rem),1fr));gap:1.2rem}
figure{margin:0;break-inside:avoid}figcaption{font-weight:600;font-size:.95rem}
svg{width:100%;height:auto;display:block;background:#fff}
svg text{font-size:13px;fill:var(--soft)}svg text.name{fill:var(--ink)}svg text.narrow{font-size:10.5px}
svg .grid{stroke:#e6eaee;stroke-width:1}svg .axis{stroke:var(--soft);stroke-width:1}
svg .level{stroke:var(--ink);stroke-width:1;stroke-dasharray:3 3}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1rem;font-size:.85rem;margin:.2rem 0}
.legend span{display:inline-flex;align-items:center;gap:.4rem;overflow-wrap:anywhere}
svg.key{width:28px;height:8px;flex:none}
.scroll{overflow-x:auto;-webkit-overflow-scrolling:touch}
table{border-collapse:separate;border-spacing:0;font-size:.88rem;font-variant-numeric:tabular-nums;min-width:60%}
th,td{padding:.28rem .7rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left;padding-left:.1rem;white-space:normal;min-width:8.5rem;
 position:sticky;left:0;background:#fff}
thead th{border-bottom:2px solid var(--soft);vertical-align:bottom}
td.bad{color:var(--bad);font-weight:600}
ul{padding-left:1.2rem}li{margin:.2rem 0}
details{margin:.6rem 0}summary{cursor:pointer;font-weight:600}
blockquote{margin:.4rem 0;padding:.2rem .8rem;border-left:3px solid var(--line);font-size:.9rem;overflow-wrap:anywhere}
@media print{body{max-width:none;padding:0;font-size:10.5pt}h2{break-after:avoid}.card{background:#fff}
 .scroll{overflow:visible}table{font-size:8.5pt}td,th{white-space:normal;padding:.15rem .4rem}tr{break-inside:avoid}
 .charts{grid-template-columns:1fr 1fr}details>*{display:block}}
"""


def to_html(result: EvalResult, title: str = "Evaluation") -> str:
    """The whole report as one self-contained page."""
    exports = ", ".join(export.name for export in result.exports)
    source = Path(result.settings.source).name
    heading = f"{title}: {exports} against {source}" if exports else f"{title}: {source}"
    body = [
        f"<h1>{escape(heading)}</h1>",
        _lead(result),
        f'<div class="cards">{"".join(_card(export, result) for export in result.exports)}</div>',
        _findings(result),
        _charts(result),
        *(_table(table) for table in all_tables(result)),
        _samples(result),
        _notes(result),
    ]
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(heading)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(filter(None, body))
        + "\n</body></html>\n"
    )
    # Half a character, as in a file name that is not UTF-8, cannot be written.
    return page.encode("utf-8", "replace").decode()


def _lead(result: EvalResult) -> str:
    if result.invalid is not None:
        bad = result.invalid
        text = (
            f"The source itself gives figures that are not finite (document {bad.document}, position {bad.position})."
        )
        return f'<p class="note"><strong>Invalid.</strong> {escape(text)}</p>'
    settings = result.settings
    text = (
        f"{settings.scored_tokens} tokens scored ({settings.scored}), {settings.scored_numeric} of them numeric. "
        f"{INTERVALS.format(kind='interval')}."
    )
    return f'<p class="note">{escape(text)}</p>'


def _card(export: ExportResult, result: EvalResult) -> str:
    if export.invalid is not None:
        bad = export.invalid
        words = f"Invalid: document {bad.document}, {bad.file} position {bad.position}: {bad.reason}."
        return f'<div class="card bad"><h3>{escape(export.name)}</h3><p>{escape(words)}</p></div>'
    gates = [gate for gate in result.gates if gate.export == export.name]
    failed = [gate for gate in gates if not gate.passed]
    kind = "bad" if failed or export.findings else "good" if gates and export.packed_linears != 0 else ""
    whole, numeric = export.slice("all"), export.slice("numeric")
    lines = []
    if whole is not None:
        lines += [
            ("KL to source", with_interval(whole.kl)),
            ("perplexity / source", with_interval(whole.perplexity_ratio)),
        ]
        lines += [("top-1 agrees", with_interval(agreement(whole), True))]
    if numeric is not None:
        lines.append(("numbers that differ", with_interval(numeric.flips, True)))
    if export.dialogue is not None:
        growth = with_interval(export.dialogue.relative_growth, True)
        lines.append(("growth beyond source", growth))
    if export.equivalence is not None:
        lines.append(("drift", export.equivalence.verdict))
    if export.packed_linears is not None:
        lines.append(("packed linears", packed_linears(export)))
    if export.size_bytes is not None:
        lines.append(("size", f"{export.size_bytes / 2**20:.1f} MiB"))
    lines += [(f"gate {gate.gate}", "passed" if gate.passed else "FAILED") for gate in gates]
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in lines)
    return f'<div class="card {kind}"><h3>{escape(export.name)}</h3><dl>{items}</dl></div>'


def _findings(result: EvalResult) -> str:
    found = result.all_findings
    if not found:
        return ""
    items = "".join(f"<li><strong>{escape(name)}</strong>: {escape(finding.message)}</li>" for name, finding in found)
    return f"<h2>Findings</h2><ul>{items}</ul>"


def _charts(result: EvalResult) -> str:
    made = charts(result)
    figures = "".join(
        f'<figure><figcaption>{escape(title)}</figcaption>{svg}<p class="note">{escape(note)}</p></figure>'
        for title, svg, note in made
    )
    return f'<h2>Pictures</h2><div class="charts">{figures}</div>' if made else ""


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    rows = "".join(
        "<tr>" + "".join(f"<td{_bad(cell)}>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    drawn = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{note}'
    if len(table.rows) > 40:
        return f"<details><summary>{escape(table.title)} ({len(table.rows)} lines)</summary>{drawn}</details>"
    return f"<h2>{escape(table.title)}</h2>{drawn}"


def _bad(cell: str) -> str:
    return ' class="bad"' if cell.startswith(("FAILED", "invalid", "different")) else ""


def _samples(result: EvalResult) -> str:
    parts = []
    for export in result.exports:
        for sample in export.free_running.samples if export.free_running else ():
            said = [
                ("user", sample.user),
                ("in the data", sample.wanted),
                ("source", sample.source),
                (export.name, sample.export),
            ]
            lines = "".join(f"<p><strong>{escape(who)}</strong>: {escape(text)}</p>" for who, text in said)
            place = f"dialogue {sample.dialogue + 1}, turn {sample.turn}"
            parts.append(f'<blockquote><p class="note">{escape(place)}</p>{lines}</blockquote>')
    return f"<h2>First differences</h2>{''.join(parts)}" if parts else ""


def _notes(result: EvalResult) -> str:
    settings = result.settings
    versions = ", ".join(f"{name} {found}" for name, found in result.versions.items())
    peak = f", peak memory {result.peak_memory_bytes / 2**30:.2f} GiB" if result.peak_memory_bytes else ""
    took = f"{number(result.seconds)} s, {number(result.cpu_seconds)} s of processor time"
    lines = [
        *result.notes,
        f"Source: {settings.source}.",
        f"Numeric tokens by {settings.numeric_rule}; margin of 'no drift' {settings.margin} nats per token.",
        f"{took}{peak}; {versions}; schema {result.schema_version}.",
    ]
    if result.command:
        lines.append(f"Command: {result.command}")
    return "<h2>Notes</h2><ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
