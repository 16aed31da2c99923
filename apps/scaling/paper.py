"""Tables 2 and 3 of the paper on its own meshes: predicted efficiency, memory and traffic.

Mesh shapes and layout are those of the configurations that the authors published (Tensor2Tensor);
the machine is a published description of a TPUv2 core.  No tensor is allocated.
"""

from __future__ import annotations

from typing import NamedTuple

import meshmpi as mm
from meshmpi.planner.machine import Machine

LAYOUT = "batch:batch;vocab:model;d_ff:model;heads:model"
LENGTH, LM_BATCH, MT_BATCH = 256, 256, 128
LANGUAGE = (
    "batch:32;model:1",
    "batch:32;model:1",
    "batch:8;model:4",
    "batch:8;model:4",
    "batch:16;model:8",
    "batch:16;model:32",
    "batch:16;model:32",
)
"""Mesh of each language model of Table 2, k = 0 to 6."""
TRANSLATION = (
    "batch:32;model:1",
    "batch:8;model:4",
    "batch:8;model:4",
    "batch:16;model:8",
    "batch:16;model:8",
    "batch:16;model:8",
)
"""Mesh of each translation model of Table 3, k = 0 to 5; the largest ran on 128 cores."""
PAPER_SECONDS = {("language", 6): 46800 / 136000, ("translation", 5): 22 * 3600 / 154000}
"""Seconds of a step: hours that the paper states over steps."""


class Row(NamedTuple):
    """One model.

    Attributes:
        what: "language" or "translation".
        k: Its number in the table.
        parameters: Trainable numbers.
        seconds: Predicted, of a step.
        efficiency: FLOP per second over the peak of all ranks.
        memory: Bytes per rank.
        bytes_sent: Per rank and step.
        bound: What most of the step waits for.
    """

    what: str
    k: int
    parameters: int
    ranks: int
    seconds: float
    efficiency: float
    memory: int
    bytes_sent: int
    bound: str


def predict(what: str, k: int, machine: Machine) -> Row:
    """The row of one model."""
    graph, loss, updates, parameters = _built(what, k)
    mesh = (LANGUAGE if what == "language" else TRANSLATION)[k]
    plan = mm.plan(graph, mesh, LAYOUT, fetches=[loss], updates=updates)
    found = mm.predict_time(plan.program, machine)
    return Row(
        what,
        k,
        parameters,
        plan.program.mesh.size,
        found.seconds,
        found.efficiency,
        plan.cost.peak_memory,
        plan.cost.bytes_sent,
        found.bound,
    )


def _built(what: str, k: int) -> tuple[mm.Graph, mm.Tensor, list, int]:
    t = mm.transformer
    half = {"activation_dtype": "bfloat16"}
    with mm.Graph() as graph:

        def tokens(name: str, batch: int, length: str = "length") -> mm.Tensor:
            return mm.placeholder(name, f"batch:{batch};{length}:{LENGTH}", "int32")

        if what == "language":
            config = t.paper_language_model(k).with_options(**half)
            x, y = tokens("tokens", LM_BATCH), tokens("targets", LM_BATCH)
            loss, _ = t.lm_loss(config, x, y, training=True)
            parameters = t.parameter_count(config)
        else:
            config = t.paper_translation_model(k).with_options(**half)
            source = tokens("source", MT_BATCH, "source_length")
            x, y = tokens("tokens", MT_BATCH), tokens("targets", MT_BATCH)
            loss, _ = t.encoder_decoder_loss(config, source, x, y, training=True)
            parameters = t.encoder_decoder_parameter_count(config)
        updates = mm.optimize.Adafactor(1e-3).minimize(loss)
    return graph, loss, updates, parameters


def table(machine: Machine) -> list[str]:
    """All models, a line each."""
    lines = [
        f"predicted on {machine.name}, {machine.peak / 1e12:.3g} TFLOP/s a rank; layout {LAYOUT}",
        f"{'model':<14}{'parameters':>14}{'ranks':>7}{'ms/step':>10}{'of peak':>9}"
        f"{'GB a rank':>11}{'MB sent':>10}  bound",
    ]
    for what, meshes in (("language", LANGUAGE), ("translation", TRANSLATION)):
        for k in range(len(meshes)):
            row = predict(what, k, machine)
            lines.append(
                f"{what + ' ' + str(k):<14}{row.parameters:>14,}{row.ranks:>7}"
                f"{1e3 * row.seconds:>10.1f}{row.efficiency:>9.0%}{row.memory / 1e9:>11.2f}"
                f"{row.bytes_sent / 1e6:>10.0f}  {row.bound}" + _stated(row)
            )
    return lines


def _stated(row: Row) -> str:
    seconds = PAPER_SECONDS.get((row.what, row.k))
    if seconds is None:
        return ""
    share = row.efficiency * row.seconds / seconds
    return f"; the paper's {1e3 * seconds:.0f} ms are {share:.0%} of peak by the same FLOP"
