"""Worker: logits of an ESM2 in meshmpi, one rank of it; started by the launcher."""

from __future__ import annotations

import argparse
from pathlib import Path

import meshmpi as mm
from apps.bench.esm2 import inputs
from apps.bench.step.yardstick import emit
from apps.esm2.layouts import splits
from apps.esm2.weights import open_model
from meshmpi.transformer.models import masked_lm


def main() -> None:
    """Runs the batch again and again and prints this rank's result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--layout", required=True)
    parser.add_argument("--mesh", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    placed = splits(options.layout, 0, options.mesh)
    mesh = mm.Mesh(options.mesh)
    model = open_model(options.model)
    with mm.Graph() as graph:
        shape = mm.Shape([("batch", options.batch), ("length", options.length)])
        logits = masked_lm(placed.config(model.config), mm.placeholder("tokens", shape, "int32"))
    step = mm.compile(graph, mesh, placed.layout, fetches=[logits], storage=placed.storage, kernels="native")
    model.fill(step.variables)
    tokens = inputs.tokens(options.batch, options.length)
    communicating: list[float] = []

    def one() -> None:
        before = step.comm_seconds
        step(tokens=tokens)
        communicating.append(step.comm_seconds - before)

    seconds = inputs.timed(one, options.steps)
    found = step(tokens=tokens)[logits].numpy()
    spent = sum(communicating[inputs.WARM :])
    emit(rank=mesh.rank, seconds=seconds, communicating=spent, checked=inputs.checked(found))


if __name__ == "__main__":
    main()
