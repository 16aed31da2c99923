"""Prints the cost of a step and the fastest layouts, without training."""

from __future__ import annotations

import dataclasses
import resource
import time

from meshmpi.amounts import bytes_of
from meshmpi.api import plan
from meshmpi.dims import MeshShape
from meshmpi.errors import ConfigError
from meshmpi.ir.kinds import COLLECTIVES
from meshmpi.planner.bounded_search import Priced, Rejected, Screen, SearchResult, search
from meshmpi.planner.candidates import Candidate, LowerBound
from meshmpi.planner.layout_search import Step, digest, pricing
from meshmpi.planner.machine import Machine, axes_between_hosts, shared_axes
from meshmpi.planner.machine_file import find_machine
from meshmpi.planner.report import fit_line, memory_lines, network_lines, time_lines, traffic_lines
from meshmpi.planner.timing import predict_time
from meshmpi.runtime.compiled import memory_plan
from meshmpi.transformer.models import TransformerConfig
from meshmpi.transformer.tasks.registry import build_training_graph, chosen
from meshmpi.transformer.training.settings import Settings
from meshmpi.transformer.training.setup import chosen_layout, mesh_shape

_SCREENED = 2
"""Layers of the model that a search looks at first."""
NO_MACHINE = "no time is predicted: this machine was not measured; `meshmpi calibrate` does it"


def plan_report(settings: Settings, program: bool = False, machine: str = "", ranks: int = 1) -> str:
    """Cost of one training step for the mesh of the settings, which need not exist.

    Args:
        program: Whether to include the text of the program.
        machine: Name or file of a machine, to predict times; empty: this host, if it was measured for that mesh.
        ranks: Ranks of the job, where the settings give no mesh.
    """
    began = time.perf_counter()
    task, config = chosen(settings)
    mesh = mesh_shape(settings.mesh, ranks)
    layout, built = chosen_layout(settings.mesh, mesh), task.build(settings, config)
    known = find_machine(machine, mesh)
    found = plan(
        built.graph,
        mesh,
        layout,
        shared=shared_axes(mesh, known),
        fetches=built.fetches,
        updates=built.updates,
        storage=settings.mesh.storage or None,
        seed=settings.train.seed,
        memory_limit=settings.mesh.memory_limit or None,
    )
    times = [NO_MACHINE]
    if known is not None:
        between = axes_between_hosts(found.program.mesh, known.ranks_per_host)
        times = [*network_lines(found.cost, found.program.mesh, between)]
        times += [*time_lines(predict_time(found.program, known)), fit_line(found.cost, known)]
    seconds = time.perf_counter() - began
    counts, values = found.program.counts(), found.program.values()
    lines = [str(found.program)] if program else []
    lines += [
        f"{task.parameter_count(config):,} parameters, mesh {mesh} ({mesh.size} ranks), layout '{layout}'",
        str(found.cost),
        f"{len(found.program.instructions)} instructions: " + ", ".join(f"{n} {kind}" for kind, n in counts.items()),
    ]
    for kind in COLLECTIVES:
        for axes, elements in values.get(kind, {}).items():
            lines.append(f"  {kind} over {axes}: {elements:,} elements per rank and step")
    lines += traffic_lines(found.program)
    lines += memory_lines(found.program, memory_plan(found.program))
    lines += [line for line in times if line]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines.append(f"planned in {seconds:.1f} s; this process took {peak / 1024:.0f} MB of memory")
    return "\n".join(lines)


def search_report(
    settings: Settings,
    ranks: int,
    machine: str = "",
    memory_limit: str | None = None,
    seconds: float = 30.0,
    most_axes: int = 2,
) -> tuple[SearchResult, str]:
    """The fastest layouts of a training step, by predicted time, and a report for people.

    Models of more than two layers are screened with two, and the best are then priced in full.

    Args:
        settings: Settings of the run; a mesh in them is the only one tried.
        machine: As for `plan_report`.
        memory_limit: Memory of one rank, as ``"8 GB"``; default: what the machine says.
        most_axes: Largest number of axes of the meshes tried.

    Raises:
        ConfigError: No machine is given, and this host was not measured; the mesh has another
            number of ranks; no time, or no axis.
    """
    _, config = chosen(settings)
    shapes = _only_mesh(settings, ranks)
    known = find_machine(machine, shapes[0] if shapes else mesh_shape(settings.mesh, ranks))
    if known is None:
        raise ConfigError(
            "there is no description of a machine to predict times with.",
            f"Run `meshmpi calibrate --ranks {ranks}` first, or give --machine FILE (or core, tpuv2).",
        )
    limit = known.memory_bytes if memory_limit is None else bytes_of(memory_limit)
    work, price = _screen(settings, config, known, limit)
    screen = None
    if config.layers > _SCREENED:
        screen = _screen(settings, config.with_options(layers=_SCREENED), known, 0)
        screen = _for_all_layers(screen, LowerBound(work, known), known, config.layers)
    found = search(
        work,
        ranks,
        known,
        price,
        seconds=seconds,
        most_axes=most_axes,
        meshes=shapes,
        screen=screen,
        slots=True,
        memory_limit=limit,
    )
    return found, f"{ranks} ranks, times predicted on {known.name}\n{found.report()}"


def _screen(settings: Settings, config: TransformerConfig, machine: Machine, limit: int) -> Screen:
    """Prices layouts of the training step of one model."""

    def step(slots: str) -> Step:
        mesh = dataclasses.replace(settings.mesh, optimizer_storage=slots)
        built = build_training_graph(dataclasses.replace(settings, mesh=mesh), config)
        return built.graph, built.fetches, built.updates

    return Screen(digest(*step("")), pricing(step, machine, limit))


def _only_mesh(settings: Settings, ranks: int) -> list[MeshShape]:
    """The mesh of the settings; nothing where all meshes are to be tried."""
    if not settings.mesh.shape:
        return []
    shape = mesh_shape(settings.mesh, ranks)
    if shape.size != ranks:
        raise ConfigError(
            f"a mesh of {shape.size} ranks, {shape}, for a job of {ranks}.",
            "Leave --mesh out to try all meshes, or ask for as many ranks as it has.",
        )
    return [shape]


def _for_all_layers(screen: Screen, whole: LowerBound, machine: Machine, layers: int) -> Screen:
    """With the memory that all layers need, about: variables, and the rest in proportion."""
    few = LowerBound(screen.work, machine)

    def price(c: Candidate) -> Priced | Rejected:
        found = screen.price(c)
        if isinstance(found, Rejected):
            return found
        rest = (found.memory - few.least_bytes(c)) * layers // _SCREENED
        return dataclasses.replace(found, memory=whole.least_bytes(c) + rest)

    return Screen(screen.work, price)
