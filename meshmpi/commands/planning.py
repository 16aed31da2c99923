"""`meshmpi plan`, `search` and `calibrate`: what a step costs, in which layout it is fastest, and
what the machine can do.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshmpi.errors import ConfigError

if TYPE_CHECKING:
    from meshmpi.train.settings import MeshSettings


def add(commands: Any, command: Any) -> None:
    """Adds the commands."""
    plan = command(commands, "plan", _plan, "cost of a training step on a mesh of any size", True)
    plan.add_argument("--program", action="store_true", help="print the whole program as well")
    plan.add_argument(
        "--machine", metavar="FILE",
        help="predict times too: a file that `meshmpi calibrate` wrote, or tpuv2; default: that of"
        " this host, where it was calibrated",
    )  # fmt: skip
    search = command(
        commands, "search", _search, "the fastest layout for a number of ranks, by prediction", True
    )
    search.add_argument("on", type=int, metavar="RANKS", help="of the job to plan for")
    search.add_argument(
        "--machine", metavar="FILE", default="",
        help="a file that `meshmpi calibrate` wrote, or tpuv2; default: this host's",
    )  # fmt: skip
    search.add_argument("--memory-limit", metavar="SIZE", help="of one rank, as '8 GB'")
    search.add_argument("--seconds", type=float, default=30.0, help="limit of the search")
    search.add_argument("--most-axes", type=int, default=2, help="of the meshes that are tried")
    calibrate = command(
        commands, "calibrate", _calibrate, "measure this machine, for predictions of time", False
    )
    # As of a dry run, the command itself is called with --ranks too: it looks, then starts them.
    calibrate.set_defaults(dry_run=True)
    calibrate.add_argument(
        "--out", type=Path, metavar="FILE",
        help="where to write the description; default: where other commands look for it",
    )  # fmt: skip
    calibrate.add_argument("--quick", action="store_true", help="leave out the largest sizes")
    calibrate.add_argument("--repeats", type=int, default=5, help="of each measurement")


def _plan(options: argparse.Namespace) -> int:
    from meshmpi.cli import settings_of
    from meshmpi.train.report import plan_report

    print(plan_report(settings_of(options), options.program, options.machine or ""))
    return 0


def _search(options: argparse.Namespace) -> int:
    from meshmpi.cli import settings_of
    from meshmpi.train.report import search_report

    if options.on < 1:
        raise ConfigError(f"{options.on} ranks.", "Give 1 or more.")
    if options.layout or options.storage:
        raise ConfigError(
            "a search looks for the layout and the storage itself.",
            "Leave --layout and --storage out; `meshmpi plan` prices a layout that you name.",
        )
    found, report = search_report(
        settings_of(options), options.on, options.machine, options.memory_limit, options.seconds,
        options.most_axes,
    )  # fmt: skip
    print(report)
    return 0 if found.best else 1


def _calibrate(options: argparse.Namespace) -> int:
    from meshmpi.train.config import from_dict
    from meshmpi.train.settings import Settings

    if options.layout:
        raise ConfigError("a machine has no layout.", "Leave --layout out.")
    if options.repeats < 1:
        raise ConfigError(f"{options.repeats} repeats.", "Give 1 or more.")
    settings = from_dict(Settings, {"mesh": {"shape": options.mesh or ""}}).mesh
    if options.ranks is None:
        return _measure(options, settings)
    return _calibrate_on_ranks(options, settings)


def _calibrate_on_ranks(options: argparse.Namespace, settings: MeshSettings) -> int:
    """Starts the same command on ranks, if they are those of the mesh."""
    from meshmpi.cli import on_ranks
    from meshmpi.runtime.mesh import size_error
    from meshmpi.train.setup import mesh_shape

    if options.ranks < 1:
        raise ConfigError(f"{options.ranks} ranks.", "Give 1 or more.")
    shape = mesh_shape(settings, options.ranks)
    if shape.size != options.ranks:
        raise size_error(shape, options.ranks)
    given = ["calibrate", f"--repeats={options.repeats}"]
    given += [f"--mesh={options.mesh}"] if options.mesh else []
    given += [f"--out={options.out}"] if options.out else []
    given += ["--quick"] if options.quick else []
    return on_ranks(options.ranks, given)


def _measure(options: argparse.Namespace, settings: MeshSettings) -> int:
    """Calibrates on the ranks of this job."""
    from meshmpi.measuring.calibrate import calibrate
    from meshmpi.measuring.machines import machine_path
    from meshmpi.planner.machine_file import machine_text
    from meshmpi.train.setup import make_mesh

    mesh = make_mesh(settings)
    machine = calibrate(mesh, repeats=options.repeats, quick=options.quick, say=print)
    if mesh.rank == 0:
        path = options.out or machine_path(mesh.shape)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(machine_text(machine), encoding="utf-8")
        print(
            f"{machine.name}: products {machine.peak / 1e9:.0f} GFLOP/s, memory"
            f" {machine.memory(1e8) / 1e9:.1f} GB/s a rank; wrote {path}"
        )
    return 0
