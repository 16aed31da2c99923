"""What tests of commands share: tiny checkpoints, settings files, calls in this process and under mpirun."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import meshmpi as mm
from meshmpi import cli
from meshmpi.launch.launch import launch
from meshmpi.transformer.pretrained import architecture
from meshmpi.transformer.pretrained.model import open_model

GPT2 = {
    "model_type": "gpt2",
    "n_layer": 1,
    "n_embd": 16,
    "n_head": 2,
    "vocab_size": 300,
    "n_positions": 24,
    "bos_token_id": 256,
    "eos_token_id": 256,
}
ESM = {
    "model_type": "esm",
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "vocab_size": 33,
    "max_position_embeddings": 24,
    "mask_token_id": 32,
    "pad_token_id": 1,
    "position_embedding_type": "rotary",
    "token_dropout": True,
    "layer_norm_eps": 1e-5,
}
T5 = {
    "model_type": "t5",
    "num_layers": 1,
    "d_model": 8,
    "num_heads": 2,
    "d_kv": 4,
    "d_ff": 12,
    "vocab_size": 40,
    "n_positions": 20,
}
LETTERS = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO", ".", "-", "<mask>"]


def made(folder: Path, config, seed=0) -> Path:
    """A checkpoint with random weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    draw = np.random.default_rng(seed)
    arrays = {
        e.keys[0]: (0.5 * draw.standard_normal(e.file_shape)).astype(np.float32) for e in architecture(config).entries
    }
    save_file(arrays, folder / "model.safetensors")
    return folder


def byte_tokenizer(folder: Path) -> Path:
    """A tokenizer.json of single bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, [])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    return folder


def run(capsys, *words) -> str:
    assert cli.main([str(w) for w in words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys, message, *words):
    assert cli.main([str(w) for w in words]) == 1
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err, err


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def by_hand(config, tokens, source=()):
    """Log-probabilities [position, vocab] by one program of exactly this length."""
    found = architecture(config)
    from meshmpi.transformer.pretrained.architectures import model_inputs, model_logits

    with mm.Graph() as graph:
        inputs = model_inputs(found, 1, len(tokens), len(source))
        logits = model_logits(found, inputs)
    step = mm.compile(graph, mm.SimulatedMesh("all:1"), fetches={"logits": logits})
    return step, {"tokens": np.array([tokens], np.int32), "mask": np.ones((1, len(tokens)), np.int32)} | (
        {"source": np.array([source], np.int32), "source_mask": np.ones((1, len(source)), np.int32)} if source else {}
    )


def log_probabilities(folder, config, tokens, source=()):
    step, feeds = by_hand(config, tokens, source)
    mm_load(step, folder)
    x = np.asarray(step(feeds)["logits"], np.float64)[0]
    return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)


def mm_load(step, folder):
    open_model(folder).load(step)


def table(text):
    head, *rows = text.splitlines()
    assert head.split("\t") == ["line", "tokens", "log_likelihood", "perplexity"]
    return [row.split("\t") for row in rows if not row.startswith("note")]


def same(found, expected):
    """Equal lines and counts, and numbers but for rounding."""
    assert [r[:2] for r in found] == [r[:2] for r in expected]
    numbers = [[float(x) for row in rows for x in row[2:]] for rows in (found, expected)]
    np.testing.assert_allclose(*numbers, rtol=1e-5)


def settings_file(tmp_path, **sections) -> Path:
    corpus = written(tmp_path / "corpus.txt", "the sea and the sky\n" * 60)
    text = f'data.corpus = "{corpus}"\ndata.held_out_fraction = 0.2\n'
    text += "train.steps = 3\ntrain.batch = 2\ntrain.plot = false\nsample.tokens = 0\n"
    text += "evaluate.every = 0\nmodel.length = 12\n"
    text += "".join(f"{k} = {v}\n" for k, v in sections.items())
    return written(tmp_path / "config.toml", text)


def held_out_loss(out: str) -> float:
    line = next(x for x in reversed(out.splitlines()) if x.startswith("held-out loss"))
    return float(line.split(": ")[1].split()[0])


def on_ranks(tmp_path, n, *words):
    environment = {"PYTHONPATH": os.getcwd(), "MESHMPI_CACHE": str(tmp_path / "cache")}
    return launch(
        n, ["-m", "meshmpi", *map(str, words)], timeout_seconds=120, capture_output=True, environment=environment
    )
