"""What every system gets: a random checkpoint in Hugging Face's files, and batches of tokens.

Needs NumPy only, but for `write_checkpoint`, which the bench itself calls.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CLS, PAD, EOS, MASK = 0, 1, 2, 32
FIRST, RESIDUES = 4, 20
WARM = 2
STDDEV = 0.05
_SCALES = ("LayerNorm.weight", "layer_norm.weight", "emb_layer_norm_after.weight")


def config(layers: int, d_model: int, heads: int) -> dict[str, Any]:
    """The config.json of an ESM2 of this size."""
    return {
        "model_type": "esm",
        "architectures": ["EsmForMaskedLM"],
        "vocab_size": 33,
        "mask_token_id": MASK,
        "pad_token_id": PAD,
        "hidden_size": d_model,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * d_model,
        "max_position_embeddings": 1026,
        "position_embedding_type": "rotary",
        "token_dropout": True,
        "layer_norm_eps": 1e-5,
        "emb_layer_norm_before": False,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "tie_word_embeddings": True,
    }


def write_checkpoint(folder: Path, layers: int, d_model: int, heads: int) -> None:
    """A folder that `from_pretrained` and meshmpi read, with random numbers in all weights."""
    from safetensors.numpy import save_file

    from meshmpi.transformer.pretrained import architecture

    values, draw = config(layers, d_model, heads), np.random.default_rng(7)
    arrays = {}
    for entry in architecture(values).entries:
        key = entry.keys[0]
        around = 1.0 if key.endswith(("LayerNorm.weight", "layer_norm.weight", "after.weight")) else 0
        noise = draw.standard_normal(entry.file_shape, np.float32) * np.float32(STDDEV)
        arrays[key] = noise + np.float32(around)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(values))


def tokens(batch: int, length: int) -> np.ndarray:
    """int32 [batch, length]: proteins of random residues, a few of them hidden; the rows are of
    different lengths, the shortest three quarters of the longest.
    """
    draw = np.random.default_rng(11)
    out = np.full((batch, length), PAD, np.int32)
    for k, row in enumerate(out):
        n = length - (length // 4) * k // max(1, batch - 1)
        row[1 : n - 1] = draw.integers(FIRST, FIRST + RESIDUES, n - 2)
        row[1 : n - 1 : 9] = MASK
        row[0], row[n - 1] = CLS, EOS
    return out


def checked(logits: np.ndarray) -> list[float]:
    """Some of the logits [batch, length, vocab], to be compared between systems."""
    places = np.arange(logits.shape[0])
    return np.asarray(logits, np.float64)[places, places % logits.shape[1]].ravel().tolist()


def timed(call: Callable[[], Any], steps: int) -> list[float]:
    """Seconds of each of ``steps`` calls after some untimed ones."""
    seconds = []
    for k in range(WARM + steps):
        began = time.perf_counter()
        call()
        if k >= WARM:
            seconds.append(time.perf_counter() - began)
    return seconds
