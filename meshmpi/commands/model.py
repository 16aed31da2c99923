"""What `plan`, `search`, `show` and `verify` look at: a Transformer by its settings, or a graph that a function builds.

All four name it alike: a TOML file, quickstart, the folder of a run, or ``module:function``; and its mesh alike:
``--mesh``, or ``--ranks N`` for one axis.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from meshmpi.commands.command import Options, settings_of
from meshmpi.dims import MeshShape
from meshmpi.errors import ConfigError, suggest
from meshmpi.graph import Graph, Tensor, Update
from meshmpi.graph.arguments import asked
from meshmpi.runtime.mesh import size_error
from meshmpi.transformer.training.settings import Settings


class Model(NamedTuple):
    """The graph that a command looks at, its fetches, updates and layouts; ``settings`` where they describe it."""

    name: str
    graph: Graph
    fetches: Sequence[Tensor] | Mapping[str, Tensor] | None
    updates: Sequence[Update]
    mesh: MeshShape
    layout: str
    storage: str
    settings: Settings | None = None

    @property
    def parameters(self) -> int:
        """Trainable numbers."""
        return sum(v.shape.size for v in self.graph.trainable_variables)


def find_model(options: Options, mesh: str) -> Model:
    """The graph that the arguments name, on ``mesh`` if they give none.

    Raises:
        ConfigError: They name no graph, or a number of ranks that is not that of the mesh.
    """
    settings = settings_of_model(options)
    if settings is None:
        return _from_function(options.model, options, mesh)
    return model_of(settings, Path(options.model).stem, MeshShape(asked_mesh(options, settings.mesh.shape, mesh)))


def settings_of_model(options: Options) -> Settings | None:
    """The settings that the arguments name; None for ``module:function``."""
    of_function = not options.model.endswith(".toml") and ":" in options.model
    return None if of_function else settings_of(options, Path(options.model))


def asked_mesh(options: Options, given: str, otherwise: str = "") -> str:
    """The mesh: that of ``--mesh`` or the settings, else one axis of ``--ranks``, else another."""
    text, ranks = options.mesh or given, options.ranks
    if ranks is not None and ranks < 1:
        raise ConfigError(f"--ranks is {ranks}.", "Give 1 or more.")
    if ranks is not None and text and MeshShape(text).size != ranks:
        raise size_error(MeshShape(text), ranks)
    return text or (f"all:{ranks}" if ranks is not None else otherwise)


def model_of(settings: Settings, name: str, mesh: MeshShape) -> Model:
    """The training step of a Transformer."""
    from meshmpi.transformer.tasks.registry import chosen
    from meshmpi.transformer.training.setup import chosen_layout

    task, config = chosen(settings)
    built, given = task.build(settings, config), settings.mesh
    layout = chosen_layout(given, mesh)
    return Model(name, built.graph, built.fetches, built.updates, mesh, layout, given.storage, settings)


def _from_function(text: str, options: Options, mesh: str) -> Model:
    if options.set:
        raise ConfigError("a function does not take settings.", "Leave --set out, or name a TOML file.")
    module, _, name = text.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ImportError as e:
        raise ConfigError(f"'{text}' cannot be found: {e}.", "Write module:function.") from None
    function = getattr(found, name, None)
    if not callable(function):
        known = [n for n, value in vars(found).items() if callable(value) and not n.startswith("_")]
        raise ConfigError(f"module '{module}' has no function '{name}'.", suggest(name, known))
    return _of_graph(name, text, asked(function, text), options, MeshShape(asked_mesh(options, "", mesh)))


def _of_graph(name: str, text: str, found: object, options: Options, mesh: MeshShape) -> Model:
    read = found.get if isinstance(found, Mapping) else lambda key: getattr(found, key, None)
    graph = found if isinstance(found, Graph) else read("graph")
    if not isinstance(graph, Graph):
        raise ConfigError(
            f"'{text}' returned {type(found).__name__}, not a graph.",
            "Return the graph, or something with .graph, .fetches and .updates.",
        )
    parts = (None, None) if isinstance(found, Graph) else (read("fetches"), read("updates"))
    updates = graph.updates if parts[1] is None else parts[1]
    return Model(name, graph, parts[0], updates, mesh, options.layout or "", options.storage or "")
