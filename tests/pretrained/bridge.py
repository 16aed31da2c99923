"""What tests of the bridge share between pytest and the ranks of its jobs; needs no PyTorch."""

from __future__ import annotations

import numpy as np

import meshmpi as mm
from meshmpi.transformer.pretrained.architectures import model_inputs, model_logits
from meshmpi.transformer.pretrained.model import Model
from tests.pretrained.models import BATCH, LENGTH, SOURCE

SPLIT = "heads?:cols;d_ff?:cols;vocab:cols"
LAYOUTS = {
    "replicated": ("all:1", "", None),
    "model_parallel": ("cols:2", SPLIT, None),
    "2d": ("rows:2;cols:2", f"batch:rows;{SPLIT}", "d_model:rows"),
    "storage": ("all:4", "batch:all", "d_model?:all;d_ff?:all;heads?:all;vocab?:all"),
}


def feeds_of(model: Model) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(3)
    vocab = model.config.vocab
    feeds = {"tokens": draw.integers(3, vocab - 1, (BATCH, LENGTH)), "mask": np.ones((BATCH, LENGTH))}
    feeds["mask"][1, 5:] = 0
    if model.kind == "encoder_decoder":
        feeds["source"] = draw.integers(3, vocab, (BATCH, SOURCE))
        feeds["source_mask"] = np.ones((BATCH, SOURCE))
        feeds["source_mask"][2, 4:] = 0
    elif model.config.token_types:
        feeds["types"] = np.zeros((BATCH, LENGTH))
    return {name: x.astype(np.int32) for name, x in feeds.items()}


def compiled(model: Model, mesh, layout="", storage=None):
    with mm.Graph() as graph:
        source = SOURCE if model.kind == "encoder_decoder" else 0
        logits = model_logits(model.architecture, model_inputs(model.architecture, BATCH, LENGTH, source))
    return mm.compile(graph, mesh, layout, fetches={"logits": logits}, storage=storage)
