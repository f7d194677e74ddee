"""One self-contained HTML page: tiles, interactive charts, tables. plotly.js is embedded, so it opens
offline."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moonep.command import cell, plain
from moonep.errors import CapabilityError

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
STYLE = """
:root { --ink:#1b2733; --soft:#5b6b7b; --line:#dde3ea; --card:#ffffff; --page:#f4f6f9; --accent:#0072b2; }
* { box-sizing:border-box; }
body { margin:0; font-family:FONT; color:var(--ink); background:var(--page); line-height:1.45; }
header { background:#14212e; color:#fff; padding:26px 32px; }
header h1 { margin:0 0 6px; font-size:22px; font-weight:650; }
header p { margin:2px 0; color:#c3ced9; font-size:14px; }
main { max-width:1280px; margin:0 auto; padding:20px 24px 48px; }
.answer { font-size:17px; background:var(--card); border-left:5px solid var(--accent); padding:14px 18px;
margin:4px 0 18px;
  border-radius:4px; box-shadow:0 1px 2px #0001; }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(165px,1fr)); gap:12px; margin-bottom:18px;
} .tile { background:var(--card); border:1px solid var(--line); border-radius:8px; padding:12px 14px; }
.tile b { display:block; font-size:22px; font-weight:650; }
.tile span { color:var(--soft); font-size:12.5px; }
section { background:var(--card); border:1px solid var(--line); border-radius:8px; padding:16px 18px;
margin-bottom:18px; } section h2 { margin:0 0 4px; font-size:16px; }
section p.why { margin:0 0 10px; color:var(--soft); font-size:13.5px; max-width:95ch; }
.scroll { overflow-x:auto; }
table { border-collapse:collapse; font-size:13px; width:100%; font-variant-numeric:tabular-nums; }
th,td { padding:6px 9px; border-bottom:1px solid var(--line); text-align:right; white-space:nowrap; }
th { color:var(--soft); font-weight:600; cursor:pointer; user-select:none; position:sticky; top:0;
background:var(--card); } td.text, th.text { text-align:left; }
td.long { white-space:normal; min-width:320px; }
tbody tr:hover { background:#f0f5fa; }
tr.best td { background:#eaf5ee; font-weight:600; }
pre { background:#f7f9fb; border:1px solid var(--line); padding:12px; overflow-x:auto; font-size:12.5px;
border-radius:6px; } footer { color:var(--soft); font-size:12.5px; }
""".replace("FONT", FONT)
SCRIPT = """
for (const c of CHARTS) {
  Plotly.newPlot(c.id, c.data, c.layout, {responsive:true, displaylogo:false});
}
for (const th of document.querySelectorAll('th')) th.addEventListener('click', () => {
  const table = th.closest('table'), i = [...th.parentNode.children].indexOf(th);
  const down = th.dataset.down === '1' ? -1 : 1; th.dataset.down = down === 1 ? '1' : '0';
  const value = r => { const v = r.children[i].dataset.value; return v === undefined ?
  r.children[i].textContent : +v; }; const rows = [...table.tBodies[0].rows].sort((a, b) => {
    const x = value(a), y = value(b); return (x < y ? -1 : x > y ? 1 : 0) * down; });
  rows.forEach(r => table.tBodies[0].append(r));
});
"""


@dataclass
class Page:
    """Collects the parts of a report in order; `render` gives the whole document."""

    title: str
    subtitle: Sequence[str] = ()
    answer: str = ""
    _tiles: list[tuple[str, str]] = field(default_factory=list)
    _body: list[str] = field(default_factory=list)
    _charts: list[dict[str, Any]] = field(default_factory=list)

    def tile(self, value: str, label: str) -> None:
        self._tiles.append((value, label))

    def chart(
        self, title: str, why: str, data: list[dict[str, Any]], layout: dict[str, Any], height: int = 420
    ) -> None:
        """A plotly chart from plain traces and layout."""
        name = f"chart{len(self._charts)}"
        base = {
            "height": height,
            "font": {"family": FONT, "size": 12.5, "color": "#1b2733"},
            "margin": {"l": 70, "r": 24, "t": 56, "b": 54},
            "paper_bgcolor": "#fff",
            "plot_bgcolor": "#fff",
            "hoverlabel": {"font": {"family": FONT}},
        }
        axis = {"gridcolor": "#e6ebf0", "zerolinecolor": "#c9d2db", "automargin": True}
        merged = {**base, **layout}
        for key in ("xaxis", "yaxis"):
            merged[key] = {**axis, **layout.get(key, {})}
        self._charts.append({"id": name, "data": plain(data), "layout": plain(merged)})
        self._body.append(_section(title, why, f'<div id="{name}"></div>'))

    def table(
        self,
        title: str,
        why: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        best: int | None = None,
    ) -> None:
        """A table that sorts when its head is clicked; row `best` is marked."""
        text = [all(isinstance(row[i], str) for row in rows) for i in range(len(columns))]
        head = "".join(
            f'<th class="{"text" if t else ""}">{html.escape(c)}</th>'
            for c, t in zip(columns, text, strict=True)
        )
        body = []
        for index, row in enumerate(rows):
            cells = "".join(_cell(value, is_text) for value, is_text in zip(row, text, strict=True))
            body.append(f'<tr class="{"best" if index == best else ""}">{cells}</tr>')
        inner = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
        self._body.append(_section(title, why, f'<div class="scroll">{inner}</div>'))

    def code(self, title: str, why: str, text: str) -> None:
        self._body.append(_section(title, why, f"<pre>{html.escape(text)}</pre>"))

    def render(self) -> str:
        """The document. Raises CapabilityError where plotly is missing."""
        try:
            from plotly.offline import get_plotlyjs
        except ImportError:
            raise CapabilityError(
                "report.html needs plotly: pip install 'moonep[sim]', or report=false for tables and PNG "
                "alone"
            ) from None
        subtitle = "".join(f"<p>{html.escape(line)}</p>" for line in self.subtitle)
        tiles = "".join(
            f'<div class="tile"><b>{html.escape(v)}</b><span>{html.escape(k)}</span></div>'
            for v, k in self._tiles
        )
        answer = f'<div class="answer">{html.escape(self.answer)}</div>' if self.answer else ""
        charts = json.dumps(self._charts, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
        title = html.escape(self.title)
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<style>{STYLE}</style><script>{get_plotlyjs()}</script></head><body>"
            f"<header><h1>{title}</h1>{subtitle}</header><main>{answer}"
            f'<div class="tiles">{tiles}</div>{"".join(self._body)}'
            "<footer>Self-contained: this file needs no network.</footer></main>"
            f"<script>const CHARTS={charts};{SCRIPT}</script></body></html>\n"
        )


def _section(title: str, why: str, inner: str) -> str:
    text = f'<p class="why">{html.escape(why)}</p>' if why else ""
    return f"<section><h2>{html.escape(title)}</h2>{text}{inner}</section>"


def _cell(value: Any, is_text: bool) -> str:
    shown = html.escape(cell(value))
    long = " long" if is_text and len(shown) > 60 else ""
    number = f' data-value="{float(value)!r}"' if isinstance(value, (int, float)) and value == value else ""
    return f'<td class="{"text" if is_text else ""}{long}"{number}>{shown}</td>'
