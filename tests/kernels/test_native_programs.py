"""Generated C in whole programs: what the passes make of models, the table of operations, layouts.

Every instruction of a program is compared with NumPy on its own, on random operands or on the feeds
of the test; all programs of a table are one library.  Then whole steps are compared, and runs
with one and with several threads bit by bit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.errors import LayoutError
from meshmpi.graph.ops.sources import ReadVariable
from meshmpi.ir.program import Program
from meshmpi.kernels.native import NativeKernels, available
from tests.kernels.native_build import Task, build, check, tasks_of
from tests.layouts import legal_layouts
from tests.ops.build import UNEVEN
from tests.ops.build import build as build_case
from tests.ops.cases import CASES
from tests.ops.run import fetched

pytestmark = pytest.mark.skipif(not available(), reason="there is no C compiler")
ROOT = Path(__file__).parent.parent.parent
MESH = mm.MeshShape("rows:2;cols:3")
INF, NAN = np.float32(np.inf), np.float32(np.nan)
RNG = np.random.default_rng(8)


def normal(*sizes: int, scale: float = 1.0) -> np.ndarray:
    return (RNG.standard_normal(sizes) * scale).astype(np.float32)


# -- what models are made of -----------------------------------------------------------------------

Graph = Callable[[], tuple[list[mm.Tensor], list]]
MODELS: dict[str, tuple[Graph, dict[str, np.ndarray], set[str]]] = {}
"""Name -> (graph: fetches and updates, feeds, kinds that must have a native form)."""


def model(feeds: dict[str, np.ndarray], *kinds: str) -> Callable[[Graph], Graph]:
    def register(graph: Graph) -> Graph:
        MODELS[graph.__name__] = (graph, feeds, set(kinds))
        return graph

    return register


def _x(*dims: tuple[str, int]) -> mm.Tensor:
    return mm.placeholder("x", list(dims))


@model({"x": normal(5, 70)}, "fused")
def rows_of_bfloat16_wait_in_a_result():
    """What a later stage needs is kept where its result will be: as bfloat16, not as an integer."""
    x = mm.cast(_x(("rows", 5), ("columns", 70)), "bfloat16")
    y = mm.tanh(x)
    return [y * y + x * y * mm.reduce_sum(y * x, reduced_dim="columns")], []


def variables_of(graph: mm.Graph) -> list[mm.Tensor]:
    return [o.output for o in graph.operations if isinstance(o, ReadVariable)]


def _with_gradient(y: mm.Tensor, *more: mm.Tensor) -> list[mm.Tensor]:
    """y, and the gradients by all placeholders and variables for a given gradient of y."""
    graph = y.graph
    wanted = [t for t in graph.placeholders.values() if t.dtype == "float32"]
    wanted += variables_of(graph)
    dy = mm.placeholder("dy", y.shape)
    found = mm.gradients([y], wanted, [dy])
    return [y, *more, *(g for g in found if g is not None)]


_EXTREME = normal(4, 40, 40, scale=30)
_EXTREME[0, 0, :3] = [1e30, -1e30, 88.8]
_EXTREME[1, 1] = -INF
_EXTREME[1, 2, 5] = NAN
_EXTREME[2, 3, 1:4] = INF
_EXTREME[3, 39] = 1e-40


@model({"x": _EXTREME, "dy": normal(4, 40, 40)}, "fused")
def causal_softmax():
    x = _x(("batch", 4), ("length", 40), ("memory", 40))
    length, memory = x.shape[1:]
    seen = mm.greater(mm.range(length), mm.range(memory), output_shape=[length, memory])
    return _with_gradient(mm.softmax(mm.where(seen, x * 0.125, -np.inf), "memory")), []


@model({"x": _EXTREME.reshape(160, 40)}, "fused")
def log_softmax():
    return [mm.log_softmax(_x(("rows", 160), ("columns", 40)), "columns")], []


@model({"x": normal(3, 50, 70, scale=3) + 100, "dy": normal(3, 50, 70)}, "fused")
def layer_norm():
    return _with_gradient(mm.layer_norm(_x(("batch", 3), ("length", 50), ("d", 70)), "d")), []


@model({"x": normal(300, 65), "dy": normal(300, 65)}, "fused")
def rms_norm_and_residual():
    x = _x(("rows", 300), ("d", 65))
    return _with_gradient(x + mm.gelu(mm.rms_norm(x, "d"))), []


@model({"x": normal(130, 5000, scale=4), "targets": RNG.integers(0, 5000, 130).astype(np.int32)}, "fused")
def cross_entropy_of_long_rows():
    x = _x(("rows", 130), ("vocab", 5000))
    targets = mm.placeholder("targets", [("rows", 130)], "int32")
    loss = mm.reduce_mean(mm.softmax_cross_entropy_with_logits(x, targets, "vocab"))
    return [loss, *mm.gradients(loss, [x])], []


@model({"x": normal(700, 130), "dy": normal(700, 130)}, "fused")
def bias_and_activation():
    x = _x(("rows", 700), ("d", 130))
    bias = mm.get_variable("bias", [x.shape[1]])
    return _with_gradient(mm.relu(x + bias)), []


@model({"x": normal(6, 20, 24), "dy": normal(6, 20, 24)}, "fused", "random")
def dropout():
    x = _x(("batch", 6), ("length", 20), ("d", 24))
    return _with_gradient(mm.dropout(mm.relu(x), True, rate=0.3)), []


@model({"x": normal(30, 20)}, "random")
def random_numbers_of_every_type():
    x = _x(("rows", 30), ("d", 20))
    several = [mm.random_uniform("a:7;b:9", dtype=d) for d in ("float32", "float64", "bfloat16")]
    return [mm.dropout(x, True, rate=0.5, noise_shape=[x.shape[1]]), *several], []


@model({"x": normal(30, 40)}, "map", "reduce")
def adam_with_clipping():
    x = _x(("rows", 30), ("d", 40))
    w = mm.get_variable("w", [x.shape[1]])
    return [], mm.optimize.AdamW(1e-2, clip_norm=0.1).minimize(mm.reduce_sum(mm.square(x * w)))


@model({"x": normal(30, 40), "t": normal(30, 50)}, "map", "fused")
def adafactor():
    x, t = _x(("rows", 30), ("d", 40)), mm.placeholder("t", "rows:30;e:50")
    w = mm.get_variable("w", [x.shape[1], t.shape[1]])
    loss = mm.reduce_mean(mm.square(mm.einsum([x, w], t.shape) - t))
    return [loss], mm.optimize.Adafactor(1e-2).minimize(loss)


@model({"index": np.int32([[0, 3, 9, -1], [3, 3, 8, 100]]), "dy": normal(2, 4, 30)}, "scatter_add")
def embedding():
    table = mm.get_variable("table", "vocab:9;d:30")
    index = mm.placeholder("index", "batch:2;length:4", "int32")
    return _with_gradient(mm.gather(table, index, "vocab")), []


def plan_of(graph: Graph, layout: str = "") -> Program:
    with mm.Graph() as built:
        fetches, updates = graph()
    return mm.plan(built, MESH, layout, fetches=fetches, updates=updates, seed=4).program


def tasks() -> dict[str, list[Task]]:
    out: dict[str, list[Task]] = {}
    for name, (graph, feeds, _) in MODELS.items():
        program = plan_of(graph)
        fed = {i.outputs[0]: feeds[i.attrs.name] for i in program.instructions if i.kind == "feed"}
        # Rows of gradients cancel: they sum to a tenth of what is summed.
        out[name] = tasks_of(program, name, arrays=fed, factor=10)
    return out


def table_tasks() -> dict[str, list[Task]]:
    """The rows of the table of operations in two layouts each, on the first and the last rank."""
    out: dict[str, list[Task]] = {}
    for case in CASES:
        built = build_case(case, UNEVEN)
        for layout in legal_layouts(built.graph, MESH, 2):
            try:
                planned = mm.plan(built.graph, MESH, layout, fetches=fetched(built, False), updates=built.updates)
            except LayoutError:
                assert case.refuses
                continue
            label = f"{case.name} {layout}"
            out.setdefault(case.name, []).extend(tasks_of(planned.program, label, ranks=(0, 5), native=None))
    return out


Library = tuple[dict[str, list[Task]], NativeKernels]


def library(by_name: dict[str, list[Task]]) -> Library:
    """The tasks and the one library of all their kernels."""
    return by_name, build([t for ts in by_name.values() for t in ts])


@pytest.fixture(scope="module")
def of_models() -> Library:
    return library(tasks())


@pytest.fixture(scope="module")
def of_table() -> Library:
    return library(table_tasks())


@pytest.mark.parametrize("name", MODELS)
def test_instructions_of_a_model(name: str, of_models: Library):
    by_name, kernels = of_models
    done = [t.instruction for t in by_name[name]]
    made = {i.kind for i in done} | {j.kind for i in done for j in i.body}
    assert MODELS[name][2] <= made, f"{name} has {made} only"
    for task in by_name[name]:
        if not task.instruction.inputs and task.instruction.kind == "map":
            task.native = False
        check(task, kernels)


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_instructions_of_the_table_of_operations(case, of_table: Library):
    by_name, kernels = of_table
    for task in by_name.get(case.name, []):
        check(task, kernels)


# -- whole steps -----------------------------------------------------------------------------------


def _language_model() -> tuple[mm.Graph, mm.Tensor, list]:
    config = mm.transformer.TransformerConfig(
        vocab=23,
        length=10,
        d_model=14,
        d_ff=20,
        heads=3,
        d_kv=5,
        layers=2,
        norm="layer",
        residual_dropout=0.2,
        attention_dropout=0.1,
        activation="gelu",
    )
    with mm.Graph() as graph:
        tokens = mm.placeholder("tokens", "batch:5;length:10", "int32")
        targets = mm.placeholder("targets", "batch:5;length:10", "int32")
        loss, _ = mm.transformer.lm_loss(config, tokens, targets, training=True)
        updates = mm.optimize.Adam(1e-2).minimize(loss)
    return graph, loss, updates


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", ["batch:rows;heads:cols;d_ff:cols;vocab:cols", "batch:rows+cols"])
def test_training_steps_are_those_of_numpy(layout: str):
    """Uneven blocks, dropout, updates in the memory of variables."""
    losses, variables = {}, {}
    for kind in ("numpy", "native"):
        graph, loss, updates = _language_model()
        step = mm.compile(
            graph, mm.SimulatedMesh("rows:2;cols:3"), layout, fetches=[loss], updates=updates, kernels=kind, seed=3
        )
        rng = np.random.default_rng(0)
        feeds = {n: rng.integers(0, 23, (5, 10)).astype(np.int32) for n in ("tokens", "targets")}
        losses[kind] = [step(feeds)[loss] for _ in range(4)]
        variables[kind] = {n: step.variables[n] for n in step.program.variables}
    np.testing.assert_allclose(losses["native"], losses["numpy"], rtol=2e-5)
    for n, a in variables["native"].items():
        np.testing.assert_allclose(a, variables["numpy"][n], atol=3e-4, err_msg=n)


_THREADS = """
import hashlib, numpy as np, meshmpi as mm
from tests.kernels.test_native_programs import variables_of
digest = hashlib.sha256()
with mm.Graph() as graph:
    x = mm.placeholder("x", "rows:600;d:130")
    y = mm.layer_norm(mm.dropout(x, True, rate=0.2), "d")
    w = mm.placeholder("w", "few:3;d:130;many:200")
    t = mm.placeholder("t", "long:400003")
    grads = mm.gradients([y], [x, *variables_of(graph)])
    parts = [mm.reduce_sum(w, output_shape="d:130;many:200"), mm.reduce_sum(mm.square(t))]
    parts.append(mm.exp(t))
    wide = mm.sin(mm.placeholder("u", "less:20;wide:9001"))
    of_row = mm.reduce_sum(wide, reduced_dim="wide")
    parts.append(mm.reduce_sum(mm.square(wide * of_row), reduced_dim="wide"))
    index = mm.placeholder("index", "rows:600", "int32")
    table = mm.get_variable("table", "vocab:50;d:130", initializer=mm.zeros_initializer())
    parts += mm.gradients([mm.gather(table, index, "vocab") * y], [table])
step = mm.compile(graph, mm.SimulatedMesh("all:1"), fetches=[y, *grads, *parts], kernels="native")
rng = np.random.default_rng(0)
feeds = {n: rng.standard_normal(p.shape.sizes) for n, p in graph.placeholders.items()}
feeds = {n: a.astype(np.float32) for n, a in feeds.items()}
feeds["index"] = rng.integers(0, 50, 600).astype(np.int32)
for value in step(feeds).values():
    digest.update(np.asarray(value if isinstance(value, float) else value.local).tobytes())
print(digest.hexdigest())
"""


@pytest.mark.matrix
def test_results_do_not_depend_on_the_number_of_threads():
    digests = [
        subprocess.run(
            [sys.executable, "-c", _THREADS],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": str(n)},
        ).stdout
        for n in (1, 2, 5)
    ]
    assert len(digests[0]) > 60
    assert digests[1:] == digests[:1] * 2
