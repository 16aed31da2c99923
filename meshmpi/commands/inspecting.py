"""`meshmpi verify` and `meshmpi show`: check a layout, and draw it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshmpi.commands.command import MACHINE, MODEL, Command, Options, answer, argument, here, watched
from meshmpi.commands.model import Model, find_model
from meshmpi.errors import ConfigError

if TYPE_CHECKING:
    from meshmpi.api import Plan
    from meshmpi.compiler.passes.memory import MemoryPlan
    from meshmpi.planner.step_time import Timed

DEFAULT_MESH = "rows:2;cols:2"
SHOWN_AS = (".html", ".svg", ".png")


def _verify(options: Options) -> int:
    from meshmpi.checking.verify import Asked, verified
    from meshmpi.job import rank_by_environment
    from meshmpi.runtime.world import world_size

    ranks = world_size()
    model = find_model(options, f"all:{ranks}" if ranks > 1 else DEFAULT_MESH)
    layouts = [options.layout] if options.layout else options.layouts
    first = rank_by_environment() == 0
    with watched("layouts", first) as looked:
        report = verified(
            model.graph,
            "all" if layouts == ["all"] else layouts,
            model.mesh,
            model.fetches,
            model.updates,
            None,
            Asked(
                "mpi" if ranks > 1 else "simulated",
                options.sample,
                "own" if options.own_types else "float64",
                storage=model.storage or None,
            ),
            looked,
        )
    if first:
        answer(options, report.text(options.rows), report.data())
    return 0 if report.ok else 1


def _show(options: Options) -> int:
    from meshmpi.drawing.report import report_text
    from meshmpi.planner.report import planned, time_lines
    from meshmpi.planner.step_time import predicted, recorded
    from meshmpi.runtime.compiled import memory_plan

    if options.out is not None and options.out.suffix not in SHOWN_AS:
        raise ConfigError(
            f"'{options.out}' has no ending for a page or a picture.",
            f"End it in {', '.join(SHOWN_AS[:-1])} or {SHOWN_AS[-1]}.",
        )
    model = find_model(options, DEFAULT_MESH)
    parts = {"fetches": model.fetches, "updates": model.updates, "storage": model.storage or None}
    found = planned(model.graph, model.mesh, model.layout, options.machine, **parts)
    program, memory = found.plan.program, memory_plan(found.plan.program)
    times = [] if found.prediction is None else time_lines(found.prediction)
    timed = predicted(program, found.prediction) if options.trace is None else recorded(program, options.trace)
    data = {**found.data(), "about": timed.about, "step": [s._asdict() for s in timed.parts]}
    if options.out is None:
        text = [report_text(program, found.plan.cost, memory, timed), "\n".join(times)]
        answer(options, "\n\n".join(filter(None, text)), data)
        return 0
    _write(options.out, found.plan, memory, model, timed, times)
    size = options.out.stat().st_size
    answer(options, f"wrote {options.out} ({size:,} bytes)", {"wrote": str(options.out), "bytes": size, **data})
    return 0


def _write(out: Path, found: Plan, memory: MemoryPlan, model: Model, timed: Timed, times: Sequence[str]) -> None:
    """The page, or its pictures alone, as the ending says."""
    from meshmpi.drawing import report_page
    from meshmpi.drawing.report import report_picture

    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".html":
        page = report_page(found.program, found.cost, memory, model.name, model.layout, times, timed)
        out.write_text(page, encoding="utf-8")
    else:
        report_picture(found.program, memory, model.name, model.layout, timed).save(out)


_LAYOUTS = "layouts to try; default: 'all' legal ones"
_VERIFY = (
    *MODEL,
    argument("--layouts", str, _LAYOUTS, ["all"], "LAYOUT", nargs="+"),
    argument("--sample", int, "try at most N layouts", metavar="N"),
    argument("--own-types", bool, "compute in the types of the graph instead of float64"),
    argument("--rows", int, "rows of the table of differences", 12),
)
_OUT = "write an .html page, or its pictures as .svg or .png; default: print text"
_TRACE = "draw the time line of recorded steps: the trace.json.gz of `meshmpi train --trace`; default: predicted"
_SHOW = (
    *MODEL,
    argument("--out", Path, _OUT, metavar="FILE"),
    argument("--trace", Path, _TRACE, metavar="FILE"),
    MACHINE,
)
_COMPARES = "compare every tensor in many layouts with one rank"
COMMANDS = (
    Command("verify", _verify, _COMPARES, _VERIFY, ("mesh", "ranks", "json")),
    Command("show", _show, "draw a layout: a page, or text", _SHOW, ("mesh", "size", "json"), here),
)
