"""meshmpi: named-tensor SPMD programs on MPI.  ``import meshmpi as mm``.

Importing it neither imports mpi4py nor initialises MPI; a Mesh does.
"""

from typing import TYPE_CHECKING, Any

from meshmpi import ops as _ops
from meshmpi.autodiff import gradients, recompute_grad
from meshmpi.dims import Dimension, Layout, MeshShape, Shape
from meshmpi.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    FeedError,
    LayoutError,
    MeshError,
    MeshmpiError,
    ProgramError,
    RangeError,
    ShapeError,
    VariableError,
)  # fmt: skip
from meshmpi.graph import Graph, Tensor, Update, Variable, scope
from meshmpi.nn import *  # noqa: F403
from meshmpi.ops import *  # noqa: F403
from meshmpi.runtime.exit_status import note_exits as _note_exits
from meshmpi.runtime.uncaught import watch as _watch_uncaught
from meshmpi.runtime.world import in_job as _in_job

if _in_job():  # before the script looks up sys.exit, so that a failing rank ends the others
    _note_exits()
_watch_uncaught()

if TYPE_CHECKING:
    from meshmpi.api import Plan, compile, plan
    from meshmpi.checking import interpret, verify
    from meshmpi.layout_search import search_layouts
    from meshmpi.nn import optimize, transformer
    from meshmpi.planner.machine_file import load_machine
    from meshmpi.planner.timing import predict_time
    from meshmpi.runtime.arrays import ShardedArray, local
    from meshmpi.runtime.mesh import Mesh
    from meshmpi.runtime.simulated_mesh import SimulatedMesh

# On a cluster thousands of processes open these files at once: what a script may not need waits.
_LAZY = {
    "Plan": "meshmpi.api",
    "compile": "meshmpi.api",
    "plan": "meshmpi.api",
    "optimize": "meshmpi.nn",
    "transformer": "meshmpi.nn",
    "Mesh": "meshmpi.runtime.mesh",
    "SimulatedMesh": "meshmpi.runtime.simulated_mesh",
    "ShardedArray": "meshmpi.runtime.arrays",
    "local": "meshmpi.runtime.arrays",
    "interpret": "meshmpi.checking",
    "verify": "meshmpi.checking",
    "search_layouts": "meshmpi.layout_search",
    "load_machine": "meshmpi.planner.machine_file",
    "predict_time": "meshmpi.planner.timing",
}
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    import importlib

    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'meshmpi' has no attribute '{name}'")


def __dir__() -> list[str]:  # what a shell completes: functions and classes, not our modules
    from types import ModuleType

    names = (n for n, value in globals().items() if not isinstance(value, ModuleType))
    public = (n for n in names if not n.startswith("_") and n not in ("Any", "TYPE_CHECKING"))
    return sorted({*public, *_LAZY, "nn", "__version__"})
