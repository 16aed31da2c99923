"""`meshmpi plan`, `search` and `calibrate`: the cost of a step, its fastest layout, the speed of the machine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshmpi.commands.command import MACHINE, MODEL, Command, Options, answer, argument, here, watched
from meshmpi.commands.model import Model, asked_mesh, find_model, settings_of_model
from meshmpi.commands.starting import on_ranks
from meshmpi.dims import MeshShape
from meshmpi.errors import ConfigError
from meshmpi.runtime.mesh import size_error
from meshmpi.transformer.training.settings import MeshSettings
from meshmpi.transformer.training.setup import make_mesh, mesh_shape


def plan_of(model: Model, machine: str, program: bool = False) -> tuple[str, dict[str, Any]]:
    """The cost of a step as text and as data; ``program``: with the text of the program."""
    from meshmpi.planner.report import planned, took

    began, how = time.perf_counter(), dict[str, Any]()
    if model.settings is not None:
        how = {"seed": model.settings.train.seed, "memory_limit": model.settings.mesh.memory_limit or None}
    storage = model.storage or None
    parts = {"fetches": model.fetches, "updates": model.updates, "storage": storage}
    found = planned(model.graph, model.mesh, model.layout, machine, **parts, **how)
    head = f"{model.parameters:,} parameters, mesh {model.mesh} ({model.mesh.size} ranks), layout '{model.layout}'"
    text = str(found.plan.program)
    lines = [text] if program else []
    data = {"parameters": model.parameters, "storage": model.storage, **found.data()}
    return "\n".join([*lines, head, *found.lines(), took(began)]), data | ({"program": text} if program else {})


def _plan(options: Options) -> int:
    answer(options, *plan_of(find_model(options, "all:1"), options.machine, options.program))
    return 0


def _search(options: Options) -> int:
    from meshmpi.planner.layout_search import search_step
    from meshmpi.planner.machine_file import find_machine
    from meshmpi.transformer.training.searching import search_training

    if options.on is not None and options.ranks is not None and options.on != options.ranks:
        raise ConfigError(f"RANKS is {options.on}, and --ranks {options.ranks}.", "Give one of them.")
    options.ranks = options.on if options.ranks is None else options.ranks
    if options.layout or options.storage:
        raise ConfigError(
            "a search finds the layout and the storage itself.",
            "Leave out --layout and --storage; `meshmpi plan` prices a given layout.",
        )
    settings = settings_of_model(options)
    given = asked_mesh(options, "" if settings is None else settings.mesh.shape)
    if not given:
        raise ConfigError("a search needs a number of ranks.", "Give --ranks N, or the only mesh to try with --mesh.")
    shape, only = MeshShape(given), bool(options.mesh or (settings is not None and settings.mesh.shape))
    known = find_machine(options.machine, shape)
    if known is None:
        raise ConfigError(
            "there is no description of a machine to predict times with.",
            f"Run `meshmpi calibrate --ranks {shape.size}` first, or give --machine FILE (or core, tpuv2).",
        )
    how: dict[str, Any] = {k: getattr(options, k) for k in ("memory_limit", "seconds", "most_axes")}
    with watched("layouts") as looked:
        if settings is None:
            model = find_model(options, given)
            named = model.fetches.values() if isinstance(model.fetches, Mapping) else model.fetches or ()
            step, meshes = (model.graph, list(named), model.updates), [shape] if only else []
            found = search_step(step, shape.size, known, meshes=meshes, **how, looked=looked)
        else:
            found = search_training(settings, shape.size, known, **how, looked=looked)
    text = f"{shape.size} ranks, times predicted on {known.name}\n{found.report()}"
    answer(options, text, {"ranks": shape.size, "machine": known.name, **found.data()})
    return 0 if found.best else 1


def _checked(options: Options) -> MeshSettings:
    if options.layout:
        raise ConfigError("calibrate does not take a layout.", "Leave --layout out.")
    if options.repeats < 1:
        raise ConfigError(f"--repeats is {options.repeats}.", "Give 1 or more.")
    return MeshSettings(shape=options.mesh or "")


def _start_calibrate(options: Options, given: Sequence[str]) -> int:
    """Starts the command on ranks, if they are those of the mesh."""
    settings = _checked(options)
    if options.ranks < 1:
        raise ConfigError(f"--ranks is {options.ranks}.", "Give 1 or more.")
    shape = mesh_shape(settings, options.ranks)
    if shape.size != options.ranks:
        raise size_error(shape, options.ranks)
    return on_ranks(options.ranks, given, options.module)


def _calibrate(options: Options) -> int:
    """Measures on the ranks of this job."""
    from meshmpi.planner.calibrate import calibrate
    from meshmpi.planner.machine_file import keep_machine, machine_text

    mesh = make_mesh(_checked(options))
    machine = calibrate(mesh, repeats=options.repeats, quick=options.quick, say=print)
    if mesh.rank == 0:
        path = options.out
        if path is None:
            path = keep_machine(machine, mesh.shape)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(machine_text(machine), encoding="utf-8")
        text = (
            f"{machine.name}: products {machine.peak / 1e9:.0f} GFLOP/s, memory"
            f" {machine.memory(1e8) / 1e9:.1f} GB/s a rank; wrote {path}"
        )
        rates = {"peak_flops": machine.peak, "memory_bytes_per_second": machine.memory(1e8)}
        answer(options, text, {"wrote": str(path), "machine": machine.name, **rates})
    return 0


_SEARCH = (
    argument("on", int, "the same as --ranks", metavar="RANKS", nargs="?", default=None),
    MACHINE,
    argument("--memory-limit", str, "memory of one rank, such as '8 GB'", metavar="SIZE"),
    argument("--seconds", float, "how much to try, as the processor time that it takes about", 30.0),
    argument("--most-axes", int, "maximum number of mesh axes to try", 2),
)
_WHERE = "file for the description; default: where other commands look for it"
_CALIBRATE = (
    argument("--out", Path, _WHERE, None, "FILE"),
    argument("--quick", bool, "leave out the largest sizes"),
    argument("--repeats", int, "repetitions of each measurement", 5),
)
_PLAN = (argument("--program", bool, "also print the whole program"), MACHINE)
_ON_RANKS = ("mesh", "ranks")
_MEASURES = "measure this machine for time predictions"
_COSTS = "print the cost of a step on a mesh of any size"
_FINDS = "find the layout with the shortest predicted step"
_TAKES = ("mesh", "size", "json")
COMMANDS = (
    Command("plan", _plan, _COSTS, (*MODEL, *_PLAN), _TAKES, here),
    Command("search", _search, _FINDS, (*MODEL, *_SEARCH), _TAKES, here),
    Command("calibrate", _calibrate, _MEASURES, _CALIBRATE, (*_ON_RANKS, "json"), _start_calibrate),
)
