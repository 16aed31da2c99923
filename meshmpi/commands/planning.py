"""`meshmpi plan`, `search` and `calibrate`: the cost of a step, its fastest layout, the speed of the machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshmpi.commands.command import MACHINE, Command, Options, argument, settings_of
from meshmpi.commands.starting import on_ranks
from meshmpi.errors import ConfigError
from meshmpi.runtime.mesh import size_error
from meshmpi.transformer.training.settings import MeshSettings
from meshmpi.transformer.training.setup import make_mesh, mesh_shape


def _plan(options: Options) -> int:
    from meshmpi.transformer.training.report import plan_report

    print(plan_report(settings_of(options, options.config), options.program, options.machine))
    return 0


def _search(options: Options) -> int:
    from meshmpi.transformer.training.report import search_report

    if options.on < 1:
        raise ConfigError(f"the number of ranks is {options.on}.", "Give 1 or more.")
    if options.layout or options.storage:
        raise ConfigError(
            "a search finds the layout and the storage itself.",
            "Leave out --layout and --storage; `meshmpi plan` prices a given layout.",
        )
    settings, o = settings_of(options, options.config), options
    found, report = search_report(settings, o.on, o.machine, o.memory_limit, o.seconds, o.most_axes)
    print(report)
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
        print(
            f"{machine.name}: products {machine.peak / 1e9:.0f} GFLOP/s, memory"
            f" {machine.memory(1e8) / 1e9:.1f} GB/s a rank; wrote {path}"
        )
    return 0


_SEARCH = (
    argument("on", int, "number of ranks to plan for", metavar="RANKS"),
    MACHINE,
    argument("--memory-limit", str, "memory of one rank, such as '8 GB'", metavar="SIZE"),
    argument("--seconds", float, "time limit of the search", 30.0),
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
COMMANDS = (
    Command("plan", _plan, "print the cost of a training step on a mesh of any size", _PLAN, ("config", "mesh")),
    Command("search", _search, "find the layout with the shortest predicted step", _SEARCH, ("config", "mesh")),
    Command("calibrate", _calibrate, _MEASURES, _CALIBRATE, _ON_RANKS, _start_calibrate),
)
