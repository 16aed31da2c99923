"""Processor seconds and memory of lowering, of each pass and of the memory plan, as programs grow.

Two families of training graphs: the paper's language model, whose layers are equal, and a network no
two layers of which have equal shapes.  Each size runs in a process of its own, which knows its peak.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Mapping

import meshmpi as mm
from apps.bench import workers
from apps.bench.bench import Bench
from apps.bench.step.yardstick import emit
from apps.bench.tables import Cell, Table
from meshmpi.compiler.collecting import without_collection
from meshmpi.compiler.lowering import lower
from meshmpi.compiler.passes.pipeline import PASSES
from meshmpi.dims import Layout, MeshShape
from meshmpi.graph.fetches import named_fetches
from meshmpi.ir.verify import Proven, verify
from meshmpi.runtime.compiled import predict_cost

Built = tuple[mm.Graph, mm.Tensor, list[mm.Update]]
NODES = (1000, 10000, 50000)
MESH, LAYOUT = "batch:2;model:2", "batch:batch;vocab?:model;d_ff:model;heads?:model"
LAYERS = 96
PLANS = ("batch:16;model:32", "batch:1;model:1", "batch:2;model:2")


def language_model(layers: int) -> Built:
    """A training step of the paper's language model with some number of layers."""
    t = mm.transformer
    config = t.paper_language_model(5).with_options(activation_dtype="bfloat16", layers=layers)
    with mm.Graph() as graph:
        x, y = (mm.placeholder(name, "batch:256;length:256", "int32") for name in ("tokens", "targets"))
        loss, _ = t.lm_loss(config, x, y, training=True)
        updates = mm.optimize.Adafactor(1e-3).minimize(loss)
    return graph, loss, updates


def unlike_layers(layers: int) -> Built:
    """A training step of a residual network whose hidden layers all have other sizes."""
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:64;d_model:32")
        for n in range(layers):
            h = mm.dense_relu_dense(x, mm.Dimension("d_ff", 8 + 2 * n), name=f"layer_{n}")
            x = mm.layer_norm(x + h, mm.Dimension("d_model", 32), name=f"norm_{n}")
        loss = mm.reduce_mean(mm.square(x))
        updates = mm.optimize.Adam(1e-3).minimize(loss)
    return graph, loss, updates


FAMILIES: Mapping[str, Callable[[int], Built]] = {"language model": language_model, "unlike layers": unlike_layers}


def layers_for(family: str, nodes: int) -> int:
    """Layers with which a graph has about this many nodes."""
    few, more = (len(FAMILIES[family](n)[0].operations) for n in (1, 2))
    return max(1, 1 + round((nodes - few) / (more - few)))


def measure(bench: Bench) -> list[Table]:
    """Seconds by stage for each family and size, and the plans of a deep model."""
    toy = bench.effort.points == 1
    rows: list[list[Cell]] = []
    plans: list[list[Cell]] = []
    stages: list[str] = []

    def stage_of(*arguments: str) -> dict:
        bench.say(f"lowering: {' '.join(arguments)}")
        return workers.alone(workers.PYTHON, "lowering", arguments)

    for family in FAMILIES:
        for nodes in (800,) if toy else NODES:
            r = stage_of("--family", family, "--layers", str(layers_for(family, nodes)), "--mesh", MESH)
            stages = list(r["seconds"])
            spent = sum(r["seconds"].values())
            per = 1e4 * spent / r["lowered"]
            rows.append(
                [family, r["nodes"], r["lowered"], r["instructions"], spent, per, 1e-6 * r["peak_bytes"]]
                + list(r["seconds"].values())
            )
    for mesh in PLANS:
        r = stage_of("--layers", str(2 if toy else LAYERS), "--mesh", mesh)
        plans.append([mesh, r["layers"], r["instructions"], sum(r["seconds"].values()), 1e-6 * r["peak_bytes"]])
    sizes = ("family", "nodes", "lowered", "instructions", "all stages", "per 10,000 lowered", "peak MB")
    notes = [
        f"On mesh {MESH}, layout {LAYOUT}. Lowered: instructions before any pass, which both check and improve.",
        "verify: after lowering and after every pass that changed something. Building the graph does not count.",
    ]
    title = "Lowering, passes and memory plan, processor seconds"
    deep = f"Plans of the paper's language model of {LAYERS} layers, processor seconds"
    columns = ("mesh", "layers", "instructions", "plan", "peak MB")
    return [Table("lowering", title, (*sizes, *stages), rows, notes), Table("deep plans", deep, columns, plans)]


@without_collection()  # as `mm.compile` does
def seconds_by_stage(built: Built, mesh: str) -> tuple[Counter[str], int, int]:
    """Processor seconds of each stage, and instructions before and after the passes."""
    graph, loss, updates = built
    spent = Counter[str]()
    mark = time.process_time()

    def lap(stage: str) -> None:
        nonlocal mark
        spent[stage] += time.process_time() - mark
        mark = time.process_time()

    proven = Proven()
    fetches = named_fetches(graph, [loss])
    program = lower(graph, MeshShape(mesh), Layout(LAYOUT), fetches, updates, proven=proven)
    lap("lower")
    lowered = len(program.instructions)
    for one in PASSES:
        before, program = program, one(program)
        lap(one.__name__)
        if program is not before:
            verify(program, proven)
        lap("verify")
    predict_cost(program)
    lap("memory and cost")
    return spent, lowered, len(program.instructions)


def main() -> None:
    """Worker: one graph, one mesh."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", choices=list(FAMILIES), default="language model")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--mesh", required=True)
    options = parser.parse_args()
    seconds_by_stage(FAMILIES[options.family](1), options.mesh)  # loads modules and libraries
    built = FAMILIES[options.family](options.layers)
    spent, lowered, instructions = seconds_by_stage(built, options.mesh)
    nodes = len(built[0].operations)
    emit(seconds=spent, layers=options.layers, nodes=nodes, lowered=lowered, instructions=instructions)


if __name__ == "__main__":
    main()
