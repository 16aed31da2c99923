"""`meshmpi verify` and `meshmpi show`: check a layout, and draw it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from meshmpi.commands.command import MACHINE, SETTINGS, Command, Options, argument, settings_of
from meshmpi.errors import ConfigError
from meshmpi.graph import Graph, Tensor, Update

if TYPE_CHECKING:
    from meshmpi.api import Plan
    from meshmpi.compiler.passes.memory import MemoryPlan
    from meshmpi.planner.step_time import Timed

DEFAULT_MESH = "rows:2;cols:2"
SHOWN_AS = (".html", ".svg", ".png")


class Model(NamedTuple):
    """The graph that a command inspects, and its fetches, updates and layouts."""

    name: str
    graph: Graph
    fetches: Sequence[Tensor] | Mapping[str, Tensor] | None
    updates: Sequence[Update]
    mesh: str
    layout: str
    storage: str


def find_model(options: Options) -> Model:
    """The graph that the arguments name; ConfigError where they name none."""
    text = options.model
    of_function = not text.endswith(".toml") and ":" in text
    return _from_function(text, options) if of_function else _from_settings(text, options)


def _from_settings(text: str, options: Options) -> Model:
    from meshmpi.transformer.tasks.registry import chosen

    settings = settings_of(options, text)
    task, config = chosen(settings)
    built, mesh = task.build(settings, config), settings.mesh
    fetches = {"loss": built.loss, "learning_rate": built.learning_rate}
    shape = mesh.shape or DEFAULT_MESH
    return Model(Path(text).stem, built.graph, fetches, built.updates, shape, mesh.layout, mesh.storage)


def _from_function(text: str, options: Options) -> Model:
    if options.set:
        raise ConfigError("a function does not take settings.", "Leave --set out, or name a TOML file.")
    module, _, name = text.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as e:
        raise ConfigError(f"'{text}' cannot be found: {e}.", "Write module:function.") from None
    found = function()
    read = found.get if isinstance(found, Mapping) else lambda key: getattr(found, key, None)
    graph = found if isinstance(found, Graph) else read("graph")
    if not isinstance(graph, Graph):
        raise ConfigError(
            f"'{text}' returned {type(found).__name__}, not a graph.",
            "Return the graph, or something with .graph, .fetches and .updates.",
        )
    parts = (None, None) if isinstance(found, Graph) else (read("fetches"), read("updates"))
    updates = graph.updates if parts[1] is None else parts[1]
    mesh, layout = options.mesh or DEFAULT_MESH, options.layout or ""
    return Model(name, graph, parts[0], updates, mesh, layout, options.storage or "")


def _verify(options: Options) -> int:
    from meshmpi.checking import verify
    from meshmpi.runtime.mesh import Mesh
    from meshmpi.runtime.world import world_size

    model, ranks = find_model(options), world_size()
    layouts = [options.layout] if options.layout else options.layouts
    mesh = options.mesh or (f"all:{ranks}" if ranks > 1 else model.mesh)
    report = verify(
        model.graph,
        "all" if layouts == ["all"] else layouts,
        mesh,
        model.fetches,
        model.updates,
        ranks="mpi" if ranks > 1 else "simulated",
        sample=options.sample,
        precision="own" if options.own_types else "float64",
        storage=model.storage or None,
    )
    if ranks == 1 or Mesh(f"all:{ranks}").rank == 0:
        print(report.text(options.rows))
    return 0 if report.ok else 1


def _show(options: Options) -> int:
    from meshmpi.api import plan
    from meshmpi.dims import MeshShape
    from meshmpi.drawing.report import report_text
    from meshmpi.planner.machine import shared_axes
    from meshmpi.planner.machine_file import find_machine
    from meshmpi.planner.report import time_lines
    from meshmpi.planner.step_time import predicted, recorded
    from meshmpi.planner.timing import predict_time
    from meshmpi.runtime.compiled import memory_plan

    if options.out is not None and options.out.suffix not in SHOWN_AS:
        raise ConfigError(
            f"'{options.out}' has no ending for a page or a picture.",
            f"End it in {', '.join(SHOWN_AS[:-1])} or {SHOWN_AS[-1]}.",
        )
    model = find_model(options)
    mesh = MeshShape(model.mesh)
    machine = find_machine(options.machine, mesh)
    found = plan(
        model.graph,
        mesh,
        model.layout,
        fetches=model.fetches,
        updates=model.updates,
        storage=model.storage or None,
        shared=shared_axes(mesh, machine),
    )
    memory = memory_plan(found.program)
    prediction = None if machine is None else predict_time(found.program, machine)
    times = [] if prediction is None else time_lines(prediction)
    program, trace = found.program, options.trace
    timed = predicted(program, prediction) if trace is None else recorded(program, trace)
    if options.out is None:
        print(report_text(program, found.cost, memory, timed))
        if times:
            print("\n" + "\n".join(times))
        return 0
    _write(options.out, found, memory, model, timed, times)
    print(f"wrote {options.out} ({options.out.stat().st_size:,} bytes)")
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


_MODEL = (argument("model", str, "a TOML file with settings, or module:function that builds a graph"), *SETTINGS)
_LAYOUTS = "layouts to try; default: 'all' legal ones"
_VERIFY = (
    *_MODEL,
    argument("--layouts", str, _LAYOUTS, ["all"], "LAYOUT", nargs="+"),
    argument("--sample", int, "try at most N layouts", metavar="N"),
    argument("--own-types", bool, "compute in the types of the graph instead of float64"),
    argument("--rows", int, "rows of the table of differences", 12),
)
_OUT = "write an .html page, or its pictures as .svg or .png; default: print text"
_TRACE = "draw the time line of recorded steps: the trace.json.gz of `meshmpi train --trace`; default: predicted"
_SHOW = (
    *_MODEL,
    argument("--out", Path, _OUT, metavar="FILE"),
    argument("--trace", Path, _TRACE, metavar="FILE"),
    MACHINE,
)
_TAKES = ("mesh", "ranks")
COMMANDS = (
    Command("verify", _verify, "compare every tensor in many layouts with one rank", _VERIFY, _TAKES),
    Command("show", _show, "draw a layout: a page, or text", _SHOW, _TAKES),
)
