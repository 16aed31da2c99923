"""`meshmpi plan`, `search` and `calibrate`: what a step costs, in which layout it is fastest, and
what the machine can do.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from meshmpi.commands.command import Command, settings_of
from meshmpi.commands.starting import on_ranks
from meshmpi.errors import ConfigError
from meshmpi.runtime.mesh import size_error
from meshmpi.transformer.training.settings import MeshSettings
from meshmpi.transformer.training.setup import make_mesh, mesh_shape


def _add_plan(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("--program", action="store_true", help="print the whole program as well")
    plan.add_argument(
        "--machine",
        metavar="FILE",
        help="predict times too: a file that `meshmpi calibrate` wrote, or tpuv2; default: that of"
        " this host, where it was calibrated",
    )


def _add_search(search: argparse.ArgumentParser) -> None:
    search.add_argument("on", type=int, metavar="RANKS", help="number of ranks of the job to plan for")
    search.add_argument(
        "--machine",
        metavar="FILE",
        default="",
        help="a file that `meshmpi calibrate` wrote, or tpuv2; default: this host's",
    )
    search.add_argument("--memory-limit", metavar="SIZE", help="memory of one rank, as '8 GB'")
    search.add_argument("--seconds", type=float, default=30.0, help="time limit of the search")
    search.add_argument("--most-axes", type=int, default=2, help="largest number of axes of the meshes that are tried")


def _add_calibrate(calibrate: argparse.ArgumentParser) -> None:
    calibrate.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where to write the description; default: where other commands look for it",
    )
    calibrate.add_argument("--quick", action="store_true", help="leave out the largest sizes")
    calibrate.add_argument("--repeats", type=int, default=5, help="repetitions of each measurement")


def _plan(options: argparse.Namespace) -> int:
    from meshmpi.transformer.training.report import plan_report

    print(plan_report(settings_of(options, options.config), options.program, options.machine or ""))
    return 0


def _search(options: argparse.Namespace) -> int:
    from meshmpi.transformer.training.report import search_report

    if options.on < 1:
        raise ConfigError(f"{options.on} ranks.", "Give 1 or more.")
    if options.layout or options.storage:
        raise ConfigError(
            "a search looks for the layout and the storage itself.",
            "Leave --layout and --storage out; `meshmpi plan` prices a layout that you name.",
        )
    found, report = search_report(
        settings_of(options, options.config),
        options.on,
        options.machine,
        options.memory_limit,
        options.seconds,
        options.most_axes,
    )
    print(report)
    return 0 if found.best else 1


def _checked(options: argparse.Namespace) -> MeshSettings:
    if options.layout:
        raise ConfigError("a machine has no layout.", "Leave --layout out.")
    if options.repeats < 1:
        raise ConfigError(f"{options.repeats} repeats.", "Give 1 or more.")
    return MeshSettings(shape=options.mesh or "")


def _start_calibrate(options: argparse.Namespace, given: Sequence[str]) -> int:
    """Starts the command on ranks, if they are those of the mesh."""
    settings = _checked(options)
    if options.ranks < 1:
        raise ConfigError(f"{options.ranks} ranks.", "Give 1 or more.")
    shape = mesh_shape(settings, options.ranks)
    if shape.size != options.ranks:
        raise size_error(shape, options.ranks)
    return on_ranks(options.ranks, given, options.module)


def _calibrate(options: argparse.Namespace) -> int:
    """Measures on the ranks of this job."""
    from meshmpi.planner.calibrate import calibrate
    from meshmpi.planner.machine_file import machine_text
    from meshmpi.planner.machines import keep_machine

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


COMMANDS = (
    Command(
        "plan", _plan, "cost of a training step on a mesh of any size", _add_plan, configured=True, starts_ranks=False
    ),
    Command(
        "search",
        _search,
        "the fastest layout for a number of ranks, by prediction",
        _add_search,
        configured=True,
        starts_ranks=False,
    ),
    Command(
        "calibrate", _calibrate, "measure this machine, for predictions of time", _add_calibrate, start=_start_calibrate
    ),
)
