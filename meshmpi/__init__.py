"""meshmpi: named-tensor SPMD programs on MPI.  ``import meshmpi as mm``.

The import does not change the interpreter (no hooks, signals or variables). It neither imports mpi4py nor initialises
MPI; making a Mesh does.
"""

from typing import TYPE_CHECKING, Any

from meshmpi import nn as _nn
from meshmpi.dims import Dimension, Layout, MeshShape, Shape
from meshmpi.errors import (
    ArgumentError,
    CheckpointError,
    ConfigError,
    DataError,
    FeedError,
    LayoutError,
    MeshError,
    MeshmpiError,
    MissingNameError,
    ProgramError,
    RangeError,
    ShapeError,
    TrainingError,
    UnusedUpdatesWarning,
    VariableError,
)
from meshmpi.graph import Graph, Tensor, Update, Variable, scope
from meshmpi.graph import ops as _ops
from meshmpi.graph.arguments import check_all as _check_all
from meshmpi.graph.autodiff import gradients, recompute_grad
from meshmpi.graph.ops import *  # noqa: F403
from meshmpi.ir.bands import Band
from meshmpi.runtime import hooks as _hooks
from meshmpi.version import VERSION as _VERSION

_check_all(globals(), ["scope", "Graph"])

if TYPE_CHECKING:
    from meshmpi.api import Plan, compile, plan
    from meshmpi.checking import interpret, verify
    from meshmpi.nn import *  # noqa: F403
    from meshmpi.nn import optimize
    from meshmpi.planner.layout_search import search_layouts
    from meshmpi.planner.machine_file import load_machine
    from meshmpi.planner.timing import predict_time
    from meshmpi.runtime.arrays import ShardedArray, local
    from meshmpi.runtime.mesh import Mesh
    from meshmpi.runtime.simulated_mesh import SimulatedMesh
    from meshmpi.training.callback import Callback
    from meshmpi.training.fit import fit
    from meshmpi.training.loggers import CSVLogger, WandbLogger

# On a cluster thousands of processes open these files at once: what a script may not need waits.
_LAZY = {
    "Plan": "meshmpi.api",
    "compile": "meshmpi.api",
    "fit": "meshmpi.training.fit",
    "Callback": "meshmpi.training.callback",
    "CSVLogger": "meshmpi.training.loggers",
    "WandbLogger": "meshmpi.training.loggers",
    "plan": "meshmpi.api",
    "optimize": "meshmpi.nn",
    "Mesh": "meshmpi.runtime.mesh",
    "SimulatedMesh": "meshmpi.runtime.simulated_mesh",
    "ShardedArray": "meshmpi.runtime.arrays",
    "local": "meshmpi.runtime.arrays",
    "interpret": "meshmpi.checking",
    "verify": "meshmpi.checking",
    "search_layouts": "meshmpi.planner.layout_search",
    "load_machine": "meshmpi.planner.machine_file",
    "predict_time": "meshmpi.planner.timing",
}
_MODULES = {
    "data": "meshmpi.data",
    "extend": "meshmpi.extend",
    "transformer": "meshmpi.transformer",
    "pretrained": "meshmpi.transformer.pretrained",
}
"""Rooms of other floors under the names that users know."""
_nn.LATER.update(_MODULES)
__version__ = _VERSION


def _guard() -> Any:
    from meshmpi.guard.mesh_watch import MeshWatch

    return MeshWatch()


_hooks.on_first_mesh(_guard)


def __getattr__(name: str) -> Any:
    import importlib

    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _nn.__all__:
        globals()[name] = getattr(_nn, name)
        return globals()[name]
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name == "__all__":  # of `from meshmpi import *`, which brings the layers too
        return [n for n in __dir__() if not n.startswith("_") and n not in _LAZY and n not in _MODULES]
    from meshmpi.errors import missing, suggest

    if name.startswith("_"):
        raise missing("meshmpi", name, ())

    homes = {n: f"mm.{home}.{n}" for home, path in _HOMES.items() for n in _public(path)}
    known = [*__dir__(), *homes]
    near = f"Write {homes[name]}." if name in homes else suggest(name, known)
    if near.startswith("Known names"):
        near = "docs/ops.md lists what there is."
    raise MissingNameError(f"module 'meshmpi' has no '{name}'.", near)


_HOMES = {"optimize": "meshmpi.nn.optimize", "schedules": "meshmpi.nn.schedules", "transformer": "meshmpi.transformer"}


def _public(module: str) -> list[str]:
    import importlib

    found = importlib.import_module(module)
    names = getattr(found, "__all__", vars(found))
    return [n for n in names if not n.startswith("_")]


def __dir__() -> list[str]:  # what a shell completes: functions and classes, not our modules
    from types import ModuleType

    names = (n for n, value in globals().items() if not isinstance(value, ModuleType))
    public = (n for n in names if not n.startswith("_") and n not in ("Any", "TYPE_CHECKING"))
    return sorted({*public, *_LAZY, *_nn.__all__, "transformer", "nn", "__version__"})
