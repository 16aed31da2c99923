"""A tiny language model and its training step, for tests of plans."""

import meshmpi as mm


def small_lm(layers=2, vocab=24):
    """(graph, fetches, updates)."""
    config = mm.transformer.TransformerConfig(
        vocab=vocab, length=8, d_model=16, d_ff=32, heads=4, d_kv=4, layers=layers
    )
    with mm.Graph() as graph:
        tokens = mm.placeholder("tokens", "batch:12;length:8", "int32")
        targets = mm.placeholder("targets", "batch:12;length:8", "int32")
        loss, _ = mm.transformer.lm_loss(config, tokens, targets, training=True)
        updates = mm.optimize.Adam(1e-3).minimize(loss)
    return graph, [loss], updates
