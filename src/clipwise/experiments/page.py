"""One HTML page that needs nothing else: the paper's statements beside what was measured, the pictures, every number."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path

from ..files import write_whole
from .case import Case
from .contenders import ABOUT, NONPRIVATE, NXBP
from .figure import Figure, Measured, overhead, speedups
from .report import Run
from .timing import Measurement

_STYLE = """
:root { color-scheme: light dark; --ink: #1a202c; --soft: #4a5568; --line: #d5dbe3; --paper: #fff; --tint: #f4f6f9; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --soft: #a9b4c2; --line: #3a4452; --paper: #161b22; --tint: #1f2630; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 66rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; margin-bottom: .2rem } h2 { margin-top: 2.6rem; border-top: 1px solid var(--line); padding-top: 1.2rem; font-size: 1.3rem }
p.soft, caption { color: var(--soft) } img { width: 100%; height: auto; background: #fff; border: 1px solid var(--line); border-radius: 6px }
table { border-collapse: collapse; width: 100%; font-size: .88rem; margin: .8rem 0 } td, th { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right }
td.word, th.word { text-align: left } thead th { background: var(--tint); position: sticky; top: 0 } .beside td { text-align: left; vertical-align: top; width: 50% }
.scroll { overflow-x: auto } details { margin: .6rem 0 } summary { cursor: pointer; color: var(--soft) } nav a { margin-right: 1rem } .warn { background: var(--tint); padding: .6rem .9rem; border-left: 4px solid #d55e00 }
"""


def save_page(run: Run, folder: Path, pictures: dict[str, Path]) -> Path:
    """index.html, with its pictures inside."""
    sections = "\n".join(_section(figure, measured, pictures.get(figure.name)) for figure, measured in run.figures)
    links = "".join(f'<a href="#{figure.name}">{escape(figure.title)}</a>' for figure, _ in run.figures)
    methods = dict.fromkeys(method for _, measured in run.figures for method in measured.methods())
    about = "".join(f'<tr><td class="word">{escape(method)}</td><td class="word">{escape(ABOUT[method])}</td></tr>' for method in methods)
    text = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>The paper's experiments, measured</title><style>{_STYLE}</style></head><body>
<h1>Fast per-example gradient clipping, measured</h1>
<p class="soft">The experiments of Lee &amp; Kifer, <em>Scaling up Differentially Private Deep Learning with Fast Per-Example Gradient Clipping</em>,
run by clipwise. {escape(describe(run))}</p>
<p class="warn">{escape(run.settings["data_note"])}</p>
<p>Every method makes the same step: forward, clipped gradients, the same noise, Adam; the clipped gradients are equal up to rounding, so only
time and memory differ. Seconds an epoch are the median step times the steps of an epoch; numbers above bars say how
many times faster than nxBP. The paper measured on an NVIDIA GeForce GTX 1080 Ti.</p>
<table><tbody>{about}</tbody></table>
<nav>{links}</nav>
{sections}
</body></html>
"""
    path = folder / "index.html"
    write_whole(path, text)
    return path


def describe(run: Run) -> str:
    """NVIDIA H200, torch 2.11.0, 2026-11-15."""
    machine, settings = run.machine, run.settings
    where = machine["gpu"] if settings["device"].startswith("cuda") else f"{machine['processor']}, {machine['cores']} cores"
    scale = "scaled down (--quick)" if settings["quick"] else "full size"
    return f"{where}; torch {machine['torch']}, Python {machine['python']}; {settings['precision']}; {scale}; {machine['date']}."


def _section(figure: Figure, measured: Measured, picture: Path | None) -> str:
    beside = "".join(
        f"<tr><td>{escape(statement.paper)}</td><td>{escape(statement.measured(measured))}</td></tr>" for statement in figure.statements
    )
    image = ""
    if picture is not None:
        data = base64.b64encode(picture.read_bytes()).decode()
        image = f'<img alt="{escape(figure.title)}: {escape(figure.about)}" src="data:image/png;base64,{data}">'
    summary = ""
    if not figure.largest_batch:
        faster, slower = escape(speedups(measured)), escape(overhead(measured))
        summary = f'<p class="soft">Times faster than nxBP: {faster}. Times an ordinary step: {slower}.</p>'
    return f"""<h2 id="{figure.name}">{escape(figure.title)}</h2>
<p>{escape(figure.about)}</p>
{image}
<table class="beside"><thead><tr><th class="word">the paper</th><th class="word">measured here</th></tr></thead><tbody>{beside}</tbody></table>
{summary}
<details><summary>every number</summary><div class="scroll">{_table(figure, measured)}</div></details>"""


def _table(figure: Figure, measured: Measured) -> str:
    if figure.largest_batch:
        head = '<th class="word">case</th><th class="word">method</th><th>largest batch</th>'
    else:
        head = (
            '<th class="word">case</th><th class="word">method</th><th>ms a step</th><th>spread</th><th>steps</th><th>s an epoch</th>'
            "<th>× ordinary</th><th>× faster than nxBP</th><th>peak GB</th>"
        )
    rows = []
    for case, found in measured.rows:
        if not found.is_shown:
            continue
        words = f'<td class="word">{escape(f"{case.panel}, {case.label}")}</td><td class="word">{escape(found.method)}</td>'
        rows.append(f"<tr>{words}{_cells(found, measured, case)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _cells(found: Measurement, measured: Measured, case: Case) -> str:
    if found.largest_batch is not None:
        return f"<td>{found.largest_batch}</td>"
    if found.seconds is None or found.spread is None:
        return f'<td class="word" colspan="7">{escape(found.why_not or "")}</td>'
    numbers = (
        1e3 * found.seconds, 1e3 * found.spread, found.steps, measured.epoch(case, found.method), measured.ratio(case, found.method, NONPRIVATE),
        measured.ratio(case, NXBP, found.method), found.peak_gigabytes,
    )  # fmt: skip
    return "".join(f"<td>{'' if number is None else f'{number:.4g}'}</td>" for number in numbers)
