"""A tiny language model with its training step, and a simple machine, for tests of plans."""

from typing import Any

import meshmpi as mm
from meshmpi.planner.machine import Curve, Machine, Network, ProductRates, operations_from


def machine(**changes: Any) -> Machine:
    """One that computes and remembers at the same speed whatever it does."""
    values: dict[str, Any] = {
        "name": "simple",
        "products": {"float32": ProductRates.constant(1e9)},
        "memory": Curve(((1.0, 1e9),)),
        "operations": operations_from(1e-9),
        "call": 0.0,
        "step": 0.0,
        "networks": {"": Network(1e-6, 1e9)},
    }
    return Machine(**values | changes)


def small_lm(layers=2, vocab=24, microbatches=1, **options):
    """(graph, fetches, updates)."""
    config = mm.transformer.TransformerConfig(
        vocab=vocab, length=8, d_model=16, d_ff=32, heads=4, d_kv=4, layers=layers, **options
    )
    with mm.Graph() as graph:
        tokens = mm.placeholder("tokens", "batch:12;length:8", "int32")
        targets = mm.placeholder("targets", "batch:12;length:8", "int32")

        def model(part):
            return {"loss": mm.transformer.lm_loss(config, *part.values(), training=True)[0]}

        feeds = {"tokens": tokens, "targets": targets}
        step = mm.optimize.serialize_training_step(feeds, model, "batch", microbatches)
        updates = mm.optimize.Adam(1e-3).apply_gradients(step[1])
    return graph, [step[0]["loss"]], updates
