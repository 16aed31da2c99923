"""Several pairs in one row give the logits and gradients that each gives alone, in any layout."""

from __future__ import annotations

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.errors import ConfigError
from meshmpi.transformer.models import PackedPairs, TransformerConfig, encoder_decoder
from meshmpi.transformer.models.transformers import encoder_decoder_loss

CONFIG = TransformerConfig(
    vocab=11, length=9, d_model=8, d_ff=10, heads=3, d_kv=4, layers=2, padding_id=0, dtype="float64"
)
PAIRS = [([3, 4, 5], [6, 7]), ([8, 2], [9, 10, 1, 3]), ([5], [4]), ([7, 7, 9, 2, 3], [2, 5, 6])]
ROWS = [[0, 1, 2], [3]]
WIDE = 8  # of sources
LAYOUTS = [
    ("all:1", ""),
    ("all:2", "batch:all"),
    ("all:2", "heads:all;d_ff:all;vocab:all"),
    ("rows:2;cols:2", "length:rows;source_length:cols"),
    ("rows:2;cols:2", "batch:rows;memory_length:cols"),
]


def packed():
    names = ("source", "source_segments", "source_places")
    fed = {n: np.zeros((2, WIDE), np.int32) for n in names}
    fed |= {n: np.zeros((2, 9), np.int32) for n in ("tokens", "targets", "segments", "places")}
    where = {}
    for r, pairs in enumerate(ROWS):
        s = t = 0
        for number, k in enumerate(pairs, start=1):
            source, target = PAIRS[k]
            a, b = slice(s, s + len(source)), slice(t, t + len(target))
            fed["source"][r, a], fed["source_segments"][r, a] = source, number
            fed["source_places"][r, a], fed["places"][r, b] = range(len(source)), range(len(target))
            fed["targets"][r, b], fed["segments"][r, b] = target, number
            fed["tokens"][r, b] = [0, *target[:-1]]
            where[k] = (r, b)
            s, t = a.stop, b.stop
    return fed, where


def results(config, fed, mesh="all:1", layout="", packing=True):
    """Logits and the gradients of all variables."""
    batch, width = fed["source"].shape
    with mm.Graph() as graph:
        source = f"batch:{batch};source_length:{width}"
        target = f"batch:{batch};length:{fed['tokens'].shape[1]}"
        p = {
            n: mm.placeholder(n, source if n.startswith("source") else target, "int32")
            for n in fed
            if packing or n in ("source", "tokens", "targets")
        }
        names = ("source_segments", "segments", "source_places", "places")
        layer = PackedPairs(*(p[n] for n in names)) if packing else None
        loss, logits = encoder_decoder_loss(config, p["source"], p["tokens"], p["targets"], packing=layer)
        gradients = mm.gradients(loss, graph.trainable_variables)
    step = mm.compile(graph, mm.SimulatedMesh(mesh), layout, fetches=[logits, loss, *gradients], seed=3)
    found = step({n: fed[n] for n in p if n in step.program.feeds})
    return (np.asarray(found[logits]), float(found[loss]), [np.asarray(found[g]) for g in gradients])


OPTIONS = [{}, {"learned_positions": False, "rotary": True}, {"learned_positions": False, "relative_buckets": 8}]


@pytest.mark.parametrize("options", OPTIONS, ids=["learned", "rotary", "relative"])
def test_packed_pairs_are_as_alone(options):
    config = CONFIG.with_options(**options)
    fed, where = packed()
    logits, loss, gradients = results(config, fed)
    tokens, losses, sums = 0, 0.0, [np.zeros_like(g) for g in gradients]
    for k, (source, target) in enumerate(PAIRS):
        alone = {
            "source": np.array([source], np.int32),
            "targets": np.array([target], np.int32),
            "tokens": np.array([[0, *target[:-1]]], np.int32),
        }
        own, mean, parts = results(config, alone, packing=False)
        row, places = where[k]
        np.testing.assert_allclose(logits[row, places], own[0], rtol=1e-10, atol=1e-10)
        tokens, losses = tokens + len(target), losses + mean * len(target)
        sums = [s + len(target) * p for s, p in zip(sums, parts, strict=True)]
    np.testing.assert_allclose(loss, losses / tokens, rtol=1e-12)
    for whole, s in zip(gradients, sums, strict=True):
        np.testing.assert_allclose(whole, s / tokens, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS[1:])
def test_packed_pairs_in_every_layout(mesh, layout):
    fed, _ = packed()
    expected, loss, gradients = results(CONFIG, fed)
    logits, found, others = results(CONFIG, fed, mesh, layout)
    np.testing.assert_allclose(logits, expected, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(found, loss, rtol=1e-12)
    for a, b in zip(others, gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-12)


def test_a_local_window_would_look_across_pairs():
    with mm.Graph():
        tokens = mm.placeholder("tokens", "batch:2;length:9", "int32")
        source = mm.placeholder("source", "batch:2;source_length:9", "int32")
        packing = PackedPairs(source, tokens, source, tokens)
        with pytest.raises(ConfigError, match="local_window is 3: a local window would look"):
            encoder_decoder(CONFIG.with_options(local_window=3), source, tokens, packing=packing)
