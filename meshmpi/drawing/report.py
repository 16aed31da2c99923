"""One HTML page about a program: its time line, its memory, which rank holds what, its traffic, its text.

The page is one file without external resources.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape

from meshmpi.amounts import amount
from meshmpi.compiler.cost import Cost
from meshmpi.compiler.passes.memory import MemoryPlan, aligned_bytes
from meshmpi.drawing.blocks import Drawn, draw_blocks
from meshmpi.drawing.groups import folded, grouped, readable
from meshmpi.drawing.memory import draw_memory
from meshmpi.drawing.picture import COLOURS, FAINT, INK, LINE, PAGE, PLAIN, Picture, soft, stacked, strong
from meshmpi.drawing.program import MOST_BOXES, draw_program
from meshmpi.drawing.timeline import draw_timeline, stages, table
from meshmpi.ir.program import LocalType, Program
from meshmpi.planner.memory_use import memory_use
from meshmpi.planner.report import masked, sent_by_scope, traffic_lines, users_name
from meshmpi.planner.step_time import Timed, predicted

MOST_PICTURES = 12
"""Tensors drawn: one of each way to be split, the largest first."""
MOST_ROWS = 40
"""Lines of a table; the rest is counted."""
MEMORY = "Memory of the rank with the largest blocks"

_COLOURS = {
    "ink": (INK, "#e8eaed"),
    "faint": (FAINT, "#a4adb8"),
    "line": (LINE, "#6b7580"),
    "page": (PAGE, "#15181c"),
    "plain": (PLAIN, "#2b3138"),
    "link": (strong(0), "#6ba8e4"),
    **{f"g{n}": (soft(n), soft(n, dark=True)) for n in range(COLOURS)},
}
"""Name -> colour on a light and on a dark page.  Pictures follow the page."""
_NAMES = {light: f"var(--{name})" for name, (light, _) in _COLOURS.items() if name != "link"}
_LIGHT, _DARK = (";".join(f"--{name}:{both[k]}" for name, both in _COLOURS.items()) for k in (0, 1))

_STYLE = (
    f":root{{color-scheme:light dark;{_LIGHT}}}\n@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    """
body{background:var(--page);color:var(--ink);font:15px/1.5 Verdana,"DejaVu Sans",sans-serif;
margin:0 auto;max-width:960px;padding:16px;overflow-wrap:anywhere}
h1{font-size:22px;margin:8px 0}h2{font-size:17px;margin:28px 0 8px}
nav a{margin-right:14px;white-space:nowrap}a,summary{color:var(--link)}summary{cursor:pointer}
table{border-collapse:collapse;font-size:13px;margin:6px 0;overflow-wrap:normal}
th,td{border-bottom:1px solid var(--line);padding:3px 10px 3px 0;text-align:left;vertical-align:top}
@media (max-width:600px){td:first-child,th:first-child{max-width:40vw;overflow-wrap:anywhere}}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
code,pre,input{font-family:"DejaVu Sans Mono",Consolas,monospace}
pre{background:var(--plain);padding:8px;overflow:auto;font-size:12px;max-height:70vh}
pre span{display:block;white-space:pre}pre span[hidden]{display:none}
.wide{overflow-x:auto}.faint{color:var(--faint)}
input{background:var(--plain);color:var(--ink);border:1px solid var(--line);padding:5px 8px;
width:60%;font-size:13px}
svg{max-width:none;border-radius:4px}
"""
)

_SCRIPT = """
const box=document.getElementById("find"),lines=[...document.querySelectorAll("#program span")],
count=document.getElementById("count");
function find(){const words=box.value.toLowerCase().split(/\\s+/).filter(Boolean);let n=0;
for(const l of lines){const text=l.textContent.toLowerCase();
const hit=words.every(w=>text.includes(w));l.hidden=!hit;n+=hit}
count.textContent=n+" of "+lines.length+" lines"}
box.addEventListener("input",find);find();
"""


def report_page(
    program: Program,
    cost: Cost,
    plan: MemoryPlan,
    title: str,
    layout: str = "",
    notes: Sequence[str] = (),
    timed: Timed | None = None,
) -> str:
    """A page of HTML about a program.

    Args:
        program: The program.
        cost: Its cost.
        plan: Its memory plan.
        title: Title of the page.
        layout: The layout as the user wrote it.
        notes: More lines of the summary, such as a predicted time.
        timed: Where the time of a step goes; default: what is predicted for an assumed machine.
    """
    timed = timed or predicted(program)
    step, memory, blocks, _ = _pictures(program, plan, layout, timed)
    sections = {
        "One step": _inline(step) + _stages(program, timed),
        "Memory over the step": _inline(memory) + _memory(program, plan),
        "Who holds what": _inline(blocks) + _dimensions(program) + _variables(program),
        "What is sent, by scope": _traffic(program),
        "Summary": _summary(program, cost, layout, notes),
        "Program as a graph": _graph(program),
        "Program": _text(program),
    }
    return _whole(title, sections)


def report_picture(
    program: Program, plan: MemoryPlan, title: str, layout: str = "", timed: Timed | None = None
) -> Picture:
    """The pictures of the page below each other: time line, memory, who holds what, the program."""
    return stacked(_pictures(program, plan, layout, timed or predicted(program)), title)


def report_text(program: Program, cost: Cost, plan: MemoryPlan, timed: Timed | None = None) -> str:
    """The same for a terminal: cost, time line, memory, who holds what, what is sent, the program as boxes."""
    step, memory, blocks, graph = _pictures(program, plan, "", timed or predicted(program))
    sent = "\n".join(traffic_lines(program, MOST_ROWS)) or "nothing is sent"
    return "\n\n".join([str(cost), step.text, memory.text, blocks.text, sent, graph.text])


def _pictures(program: Program, plan: MemoryPlan, layout: str, timed: Timed) -> list[Picture]:
    return [
        draw_timeline(program, timed, "Where the time of a step goes"),
        draw_memory(program, plan, MEMORY, 900.0),
        draw_blocks(_examples(program), program.mesh, "", 900.0, layout or None),
        draw_program(program, "Program as a graph"),
    ]


def _stages(program: Program, timed: Timed) -> str:
    """The numbers of the time line, folded away."""
    found = stages(program, timed.parts)
    head = ("scope, in the order of the step", "", "instructions", "milliseconds", "share")
    body = _table(head, table(found), (2, 4))
    said = f'<p class="faint">{escape(timed.about)}</p>'
    return f"{said}<details><summary>The time line as a table</summary>{body}</details>"


def _whole(title: str, sections: Mapping[str, str]) -> str:
    """The page, of sections in HTML by title."""
    links = "".join(f'<a href="#s{n}">{escape(t)}</a>' for n, t in enumerate(sections))
    bodies = "".join(
        f'<section id="s{n}"><h2>{escape(t)}</h2>{body}</section>' for n, (t, body) in enumerate(sections.items())
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>"
        f"<nav>{links}</nav>{bodies}<script>{_SCRIPT}</script></body></html>\n"
    )


def _inline(picture: Picture) -> str:
    """The picture, in colours that follow the page's."""
    return f'<div class="wide">{re.sub("#[0-9a-f]{6}", lambda c: _NAMES.get(c[0], c[0]), picture.svg())}</div>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Cells are text, not HTML; columns of ``numbers`` stand on the right."""

    def line(cells: Sequence[str], tag: str) -> str:
        parts = (f"<{tag}{' class=n' if k in numbers else ''}>{escape(c)}</{tag}>" for k, c in enumerate(cells))
        return f"<tr>{''.join(parts)}</tr>"

    more = len(rows) - MOST_ROWS
    body = "".join(line(r, "td") for r in rows[:MOST_ROWS])
    note = f'<p class="faint">and {more} more</p>' if more > 0 else ""
    return f'<div class="wide"><table><thead>{line(head, "th")}</thead><tbody>{body}</tbody></table></div>{note}'


def _summary(program: Program, cost: Cost, layout: str, notes: Sequence[str]) -> str:
    kinds = ", ".join(f"{n} {kind}" for kind, n in program.counts().items())
    rows = [
        ("mesh", f"{program.mesh}, {program.mesh.size} ranks"),
        ("layout", layout or "(none: every rank holds everything)"),
        ("computation", f"{amount(cost.flops, 'FLOP')} per rank and step"),
        ("sent", f"{amount(cost.bytes_sent, 'B')} per rank and step"),
        ("memory", f"{amount(cost.peak_memory, 'B')} per rank ({cost.peak_memory:,} bytes)"),
        ("instructions", f"{len(program.instructions)}: {kinds}"),
        ("digest", program.digest()[:16]),
    ]
    said = "".join(f"<p>{escape(n)}</p>" for n in notes)
    return _table(("of the rank with the largest blocks", ""), rows) + said


def _dimensions(program: Program) -> str:
    """Every split dimension with the ways in which it is split."""
    types = [*(v.type for v in program.variables.values()), *program.types.values()]
    found = Counter((d.name, d.size, "+".join(axes)) for t in types for d, axes in zip(t.shape, t.splits, strict=True))
    split = {name for name, _, axes in found if axes and not name.startswith("_")}
    rows = []
    for (name, size, axes), n in sorted(found.items()):
        if name in split:
            blocks = program.mesh.count(axes.split("+")) if axes else 1
            rows.append((name, f"{size:,}", axes or "whole", f"{blocks}", f"{-(-size // blocks):,}", f"{n}"))
    if not rows:
        return "<p>No dimension is split.</p>"
    return _table(("dimension", "size", "over", "blocks", "of up to", "values"), rows, (1, 3, 4, 5))


def _variables(program: Program) -> str:
    """Variables by name without numbers, the largest first."""
    found: dict[tuple[str, str, str, int], list[int]] = {}
    mesh, origin = program.mesh, dict.fromkeys(program.mesh.names, 0)
    for v in program.variables.values():
        block, copies = "x".join(map(str, v.type.max_sizes(mesh))) or "1", mesh.size // mesh.count(v.type.used_axes)
        key = (masked(v.name), str(v.type), block, copies)
        found.setdefault(key, []).append(aligned_bytes(v.type, program, origin))
    rows = [
        (name, f"{len(sizes)}", kind, block, f"{copies}", amount(sum(sizes), "B"))
        for (name, kind, block, copies), sizes in sorted(found.items(), key=lambda item: -sum(item[1]))
    ]
    head = ("variable", "count", "type", "block of a rank", "copies", "bytes of a rank")
    return _table(head, rows, (1, 4, 5))


def _examples(program: Program) -> list[Drawn]:
    """One variable, feed or value for each way to be split, the largest first."""
    named: list[tuple[str, LocalType]] = [(masked(v.name), v.type) for v in program.variables.values()]
    named += [(f"feed {n}", t) for n, t in program.feeds.items()]
    for i in program.instructions:
        if i.source.name and not i.traits.given:
            where = "/".join(masked(users_name(i)).split("/")[-2:])
            named += [(where, program.types[v]) for v in i.outputs if not program.types[v].halos]
    chosen: dict[tuple, tuple[str, LocalType]] = {}
    for name, t in named:
        pattern = tuple(zip(t.shape.names, t.splits, strict=True))
        if not t.used_axes or any(n.startswith("_") for n in t.shape.names):
            continue
        if pattern not in chosen or t.shape.size > chosen[pattern][1].shape.size:
            chosen[pattern] = (name, t)
    ordered = sorted(chosen.values(), key=lambda item: -item[1].shape.size)[:MOST_PICTURES]
    return [*(ordered or named[:3])]


def _traffic(program: Program) -> str:
    found = sent_by_scope(program)
    whole = sum(sent for _, sent in found.values()) or 1
    rows = [
        (scope or "(none)", kind, axes, f"{count}", amount(sent, "B"), f"{sent / whole:.1%}", line)
        for (scope, kind, axes, line), (count, sent) in found.items()
    ]
    if not rows:
        return "<p>Nothing is sent.</p>"
    return _table(("scope", "collective", "over", "count", "bytes sent", "share", "line"), rows, (3, 4, 5))


def _graph(program: Program) -> str:
    """The whole as boxes; below it each box of several instructions, folded away."""
    depth = readable(program, MOST_BOXES)
    parts = [_inline(draw_program(program, depth=depth))]
    if depth is None:
        return parts[0]
    parts.append("<p>Boxes of scopes, opened:</p>")
    for g in folded(grouped(program, depth)):
        if len(g.numbers) == 1:
            continue
        sent = "; ".join(f"{n} {kind} over {axes}" for (kind, axes), (n, _) in g.sent.items())
        head = f"{g.name}: {len(g.numbers)} instructions" + (f", {sent}" if sent else "")
        one = g.numbers[: g.once or None]
        if len(one) <= MOST_BOXES:
            body = _inline(draw_program(program, depth=None, numbers=one))
        else:
            body = f"<p>{len(g.numbers)} instructions are too many to draw; see the text.</p>"
        parts.append(f"<details><summary>{escape(head)}</summary>{body}</details>")
    return "".join(parts)


def _memory(program: Program, plan: MemoryPlan) -> str:
    kinds = {**memory_use(program, plan).at_peak, "in all": plan.total_bytes}
    rows = [(k, amount(n, "B"), f"{n:,}") for k, n in kinds.items() if n or k == "in all"]
    return _table(("kind, at the peak", "", "bytes"), rows, (1, 2))


def _text(program: Program) -> str:
    lines = "".join(f"<span>{escape(s)}</span>" for s in program.text(sources=True).splitlines())
    return (
        '<p><input id="find" type="search" placeholder="words to find: all_reduce model.py:57"'
        ' aria-label="find in the program"> <span id="count" class="faint"></span></p>'
        f'<pre id="program">{lines}</pre>'
    )
