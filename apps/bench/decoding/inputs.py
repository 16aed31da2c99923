"""What every system gets: a random GPT-2 in Hugging Face's files, and prompts.

Needs NumPy only, but for `write_checkpoint`, which the bench itself calls.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from apps.bench.esm2.inputs import timed

STDDEV = 0.05


def config(layers: int, d_model: int, vocab: int, positions: int) -> dict[str, Any]:
    """The config.json of a GPT-2 of this size, with heads of 64."""
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": vocab,
        "n_embd": d_model,
        "n_layer": layers,
        "n_head": max(1, d_model // 64),
        "n_positions": positions,
        "activation_function": "gelu_new",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def write_checkpoint(folder: Path, layers: int, d_model: int, vocab: int, positions: int) -> None:
    """A folder that `from_pretrained` and meshmpi read, with random numbers in all weights."""
    from safetensors.numpy import save_file

    from meshmpi.transformer.pretrained import architecture

    values, draw = config(layers, d_model, vocab, positions), np.random.default_rng(7)
    arrays = {}
    for entry in architecture(values).entries:
        noise = draw.standard_normal(entry.file_shape, np.float32) * np.float32(STDDEV)
        scale = entry.keys[0].endswith(("ln_1.weight", "ln_2.weight", "ln_f.weight"))
        arrays[entry.keys[0]] = noise + np.float32(scale)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(values))


def prompts(batch: int, length: int, vocab: int) -> np.ndarray:
    """int64 [batch, length] of random tokens."""
    return np.random.default_rng(11).integers(1, vocab, (batch, length))


def options() -> argparse.ArgumentParser:
    """The arguments that both workers share."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    for name in ("batch", "prompt", "new", "vocab", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser


def measured(generate: Callable[[], list[list[int]]], steps: int) -> dict[str, Any]:
    """Seconds of each call, and the tokens of the last."""
    texts: list[list[list[int]]] = []
    seconds = timed(lambda: texts.append(generate()), steps)
    return {"seconds": seconds, "texts": texts[-1]}
