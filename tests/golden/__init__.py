"""Golden programs: what a few small models become in the paper's layouts, as text under review.

``python -m tests.golden --update`` rewrites the files; the difference shows what a change does to
communication.  The two-layer network is kept as a whole program, the Transformer as the list of its
collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import meshmpi as mm
from meshmpi.ir.kinds import COLLECTIVES
from meshmpi.ir.program import Program
from meshmpi.nn.optimize import SGD
from meshmpi.transformer.models import TransformerConfig, lm_loss

FOLDER = Path(__file__).parent
MESH = "rows:2;cols:2"


def two_layer_network() -> tuple[mm.Graph, list[mm.Tensor], list[mm.Update]]:
    """The paper's section 4 example: x w + bias, relu, v, squared loss, one step of SGD."""
    batch, io, hidden = mm.Dimension("batch", 8), mm.Dimension("io", 6), mm.Dimension("hidden", 12)
    with mm.Graph() as graph:
        x, t = mm.placeholder("x", [batch, io]), mm.placeholder("t", [batch, io])
        w, v = mm.get_variable("w", [io, hidden]), mm.get_variable("v", [hidden, io])
        bias = mm.get_variable("bias", [hidden])
        h = mm.maximum(mm.einsum([x, w], [batch, hidden]) + bias, 0.0)
        loss = mm.reduce_mean(mm.square(mm.einsum([h, v], [batch, io]) - t))
        updates = SGD(0.1).minimize(loss)
    return graph, [loss], updates


CONFIG = TransformerConfig(vocab=20, length=6, d_model=8, d_ff=16, heads=4, d_kv=2, layers=1)
BATCH = 4


def transformer(
    config: TransformerConfig = CONFIG, optimizer: SGD | None = None
) -> tuple[mm.Graph, list[mm.Tensor], list[mm.Update]]:
    """The paper's language model (section 9) with a training step."""
    shape = mm.Shape([("batch", BATCH), ("length", config.length)])
    with mm.Graph() as graph:
        tokens = mm.placeholder("tokens", shape, "int32")
        targets = mm.placeholder("targets", shape, "int32")
        loss, _ = lm_loss(config, tokens, targets, training=True)
        updates = (optimizer or SGD(0.1)).minimize(loss)
    return graph, [loss], updates


def program(model: Callable[[], tuple], layout: str, mesh: str = MESH, **options: object) -> Program:
    graph, fetches, updates = model()
    return mm.plan(graph, mesh, layout, fetches=fetches, updates=updates, **options).program


def communication(p: Program) -> str:
    """The collectives of a program, one value a line, and how often each kind occurs."""
    lines = [f"collectives of a training step on mesh {p.mesh}"]
    for i in p.instructions:
        if i.kind in COLLECTIVES:
            details = " ".join(f"{k}={'+'.join(v) if k == 'axes' else v}" for k, v in i.attrs.items())
            lines.append(f"{i.kind} {details}")
            lines += [f"    {p.types[v]}" for v in i.inputs]
    for kind, table in p.values().items():
        lines += [f"{kind} over {axes}: {n} values per rank" for axes, n in table.items()]
    return "\n".join(lines)


GOLDEN: dict[str, Callable[[], str]] = {
    "two_layer_one_rank": lambda: program(two_layer_network, "").text(),
    "two_layer_data": lambda: program(two_layer_network, "batch:rows+cols").text(),
    "two_layer_model": lambda: program(two_layer_network, "hidden:rows+cols").text(),
    "two_layer_both": lambda: program(two_layer_network, "batch:rows;hidden:cols").text(),
    "two_layer_data_zero": lambda: program(two_layer_network, "batch:rows", storage="io?:rows").text(),
    "transformer_data": lambda: communication(program(transformer, "batch:rows+cols")),
    "transformer_model": lambda: communication(program(transformer, "heads:cols;d_ff:cols;vocab:cols", "cols:2")),
    "transformer_both": lambda: communication(program(transformer, "batch:rows;heads:cols;d_ff:cols;vocab:cols")),
    "transformer_sequence": lambda: communication(
        program(
            lambda: transformer(CONFIG.with_options(residual_constraint="length:cols")),
            "heads:cols;d_ff:cols;vocab:cols",
            "cols:2",
        )
    ),
}


def path(name: str) -> Path:
    return FOLDER / f"{name}.txt"


def update() -> list[str]:
    """Rewrites the files; returns the names of those that changed."""
    changed = []
    for name, text in GOLDEN.items():
        new = text() + "\n"
        if not path(name).exists() or path(name).read_text() != new:
            path(name).write_text(new)
            changed.append(name)
    return changed
