"""Makes a loop ready for its first step, and runs it while it holds the folder of the run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, Union

from meshmpi import checkpoint
from meshmpi.graph import Tensor
from meshmpi.guard.status import publish
from meshmpi.planner.report import network_lines
from meshmpi.runtime.agreement import from_first
from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.training.callback import Callback, Interrupted
from meshmpi.training.guard import Guard
from meshmpi.training.lock import held, renamed
from meshmpi.training.loop import Loop, Result
from meshmpi.training.measured import Measured
from meshmpi.training.metrics import write_document
from meshmpi.training.progress import Extras, LiveLine, Progress
from meshmpi.training.settings import LoopSettings
from meshmpi.training.stopping import find_limit

Trained = TypeVar("Trained", bound=Loop)
Initialize = Callable[[Trained], None]
"""Gives a new loop other initial values, or those to go on from."""
Resume = Union[bool, str, os.PathLike[str]]
"""Whether to go on from the newest checkpoint, or the one to go on from."""


def equip(
    loop: Loop,
    live: LiveLine,
    extras: Extras,
    lead: str,
    began: float,
    facts: Mapping[str, Any],
    work: tuple[float, str],
    finite: Tensor | None,
    callbacks: Sequence[Callback],
    *,
    machine: str = "",
    dtype: str = "float32",
) -> None:
    """Gives a loop its callbacks and its time limit; arguments as `Measured`, `Progress` and `Guard`.  Collective."""
    step, s, folder, mesh = loop.step, loop.settings, loop.folder, loop.mesh
    measured = Measured(step, s, folder, loop.say, extras, facts, machine, dtype)
    progress = Progress(s, folder, mesh, live, work, extras, measured.fastest)
    loop.callbacks += [progress, measured, *callbacks, Guard(loop, loop.fetches["loss"], finite)]
    report_start(loop, lead, time.perf_counter() - began)
    measured.introduce()
    variable_bytes = sum(a.nbytes for b in step.variables.blocks.values() for a in b.values())
    loop.stop.limit = from_first(mesh, lambda: find_limit(s.train.time_limit, variable_bytes))
    loop.stop.check()


def report_start(loop: Loop, lead: str, seconds: float) -> None:
    """Says what is trained, ``lead``, and what a step costs."""
    program, cost, mesh = loop.step.program, loop.step.cost, loop.mesh
    loop.say(lead)
    loop.say(
        f"ready in {seconds:.1f} s: {len(program.instructions)} instructions; per rank and step"
        f" {cost.flops / 1e9:.3g} GFLOP, {cost.bytes_sent / 1e6:.3g} MB sent,"
        f" {cost.peak_memory / 1e6:.3g} MB of memory"
    )
    for line in network_lines(cost, mesh.shape, mesh.axes_between_hosts):
        loop.say(line)


def ready(
    loop: Trained, resume: Resume | Initialize[Trained], initialize: Initialize[Trained] | None = None
) -> Trained:
    """Prepares variables and folder of a new loop for its first step.  Collective.

    Args:
        resume: What to go on from; False: an earlier run in the folder is renamed.
        initialize: Called where nothing is resumed.
    """
    folder, mesh = loop.folder, loop.mesh
    if callable(resume):  # it gives the loop its variables
        resume(loop)
    elif resume is False:
        old = from_first(mesh, lambda: set_aside(folder))
        if old is not None:
            loop.say(f"renamed the earlier run {folder} to {old}")
        if initialize is not None:
            initialize(loop)
        loop.whole = True
    else:
        loop.resume(None if resume is True else resume)
    from_first(mesh, lambda: write_settings(loop.settings, folder))
    publish(folder.absolute())  # the working folder may change
    return loop


def run_loop(
    mesh: AnyMesh, folder: str | os.PathLike[str], say: Callable[[str], None], make: Callable[[], Loop]
) -> Result:
    """Makes a loop and runs it; ConfigError where another job writes the folder of the run.  Collective."""
    with held(mesh, folder):
        try:
            loop = make()
        except Interrupted as stop:
            if mesh.rank == 0:
                say(f"stopped by {stop.reason} before the first step: there is nothing to save")
            return Result(stopped_by=stop.reason)
        return loop.run()


def set_aside(folder: str | os.PathLike[str]) -> Path | None:
    """Renames the folder of an earlier run, so that a new one does not mix with it; its new name, or None."""
    folder = Path(folder)
    if not checkpoint.find(folder / "checkpoints") and not list(folder.glob("metrics-*.jsonl")):
        return None
    k = 1
    while (new := folder.with_name(f"{folder.name}.{k}")).exists():
        k += 1
    folder.rename(new)
    renamed(folder, new)
    return new


def write_settings(settings: LoopSettings, folder: str | os.PathLike[str]) -> None:
    """Writes all settings of a run into ``settings.json`` of its folder, for people to read."""
    write_document(Path(folder, "settings.json"), asdict(settings))
