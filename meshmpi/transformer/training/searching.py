"""The fastest layouts of a training step, without training."""

from __future__ import annotations

import dataclasses

from meshmpi.amounts import bytes_of
from meshmpi.dims import MeshShape
from meshmpi.planner.bounded_search import Looked, Priced, Rejected, Screen, SearchResult, search
from meshmpi.planner.candidates import Candidate, LowerBound
from meshmpi.planner.layout_search import Step, digest, pricing
from meshmpi.planner.machine import Machine
from meshmpi.transformer.models import TransformerConfig
from meshmpi.transformer.tasks.registry import build_training_graph, chosen
from meshmpi.transformer.training.settings import Settings

_SCREENED = 2
"""Layers of the model that a search looks at first."""


def search_training(
    settings: Settings,
    ranks: int,
    known: Machine,
    memory_limit: str | None = None,
    seconds: float = 30.0,
    most_axes: int = 2,
    looked: Looked | None = None,
) -> SearchResult:
    """The fastest layouts of a training step, by predicted time.

    Models of more than two layers are screened with two, and the best are then priced in full.

    Args:
        settings: Settings of the run; a mesh in them is the only one tried.
        known: The machine.
        memory_limit: Memory of one rank, as ``"8 GB"``; default: what the machine says.
        seconds, most_axes, looked: As for `mm.search_layouts`.

    Raises:
        ConfigError: The mesh has another number of ranks; no time, or no axis.
    """
    _, config = chosen(settings)
    shapes = [MeshShape(settings.mesh.shape)] if settings.mesh.shape else []
    limit = known.memory_bytes if memory_limit is None else bytes_of(memory_limit)
    work, price = _screen(settings, config, known, limit)
    screen = None
    if config.layers > _SCREENED:
        screen = _screen(settings, config.with_options(layers=_SCREENED), known, 0)
        screen = _for_all_layers(screen, LowerBound(work, known), known, config.layers)
    return search(
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
        looked=looked,
    )


def _screen(settings: Settings, config: TransformerConfig, machine: Machine, limit: int) -> Screen:
    """Prices layouts of the training step of one model."""

    def step(slots: str) -> Step:
        mesh = dataclasses.replace(settings.mesh, optimizer_storage=slots)
        built = build_training_graph(dataclasses.replace(settings, mesh=mesh), config)
        return built.graph, built.fetches, built.updates

    return Screen(digest(*step("")), pricing(step, machine, limit))


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
