"""A tiny language model and its training step, for tests of plans."""

import meshmpi as mm


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
