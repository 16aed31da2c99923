"""score, generate, export and train --init-from: what they print, and every mistake they tell."""

from __future__ import annotations

import json
import math
import os
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import meshmpi as mm
from meshmpi import cli
from meshmpi.commands.pretrained import otherwise
from meshmpi.launch.launch import launch
from meshmpi.transformer.pretrained import architecture
from meshmpi.transformer.pretrained.lines import Line
from meshmpi.transformer.pretrained.model import open_model
from meshmpi.transformer.pretrained.scoring import SHORTEST, Scorer, total

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


@pytest.fixture(autouse=True)
def _simulated(monkeypatch, tmp_path):
    """Commands run on two simulated ranks, and keep their caches here."""
    monkeypatch.setenv("MESHMPI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("meshmpi.transformer.training.setup.make_mesh", lambda s: mm.SimulatedMesh(s.shape or "all:2"))
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


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


BERT = {
    "model_type": "bert",
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "vocab_size": 8,
    "max_position_embeddings": 24,
}


def test_the_mask_of_a_tokenizer_serves_where_the_config_has_none(tmp_path, capsys):
    pytest.importorskip("tokenizers")
    model = made(tmp_path / "bert", BERT)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "sea", "##s", "the"]
    (model / "vocab.txt").write_text("\n".join(words) + "\n")
    file = written(tmp_path / "f", "the sea\n")
    found = run(capsys, "score", model, file)
    (model / "config.json").write_text(json.dumps({**BERT, "mask_token_id": 4}))
    assert run(capsys, "score", model, file) == found and "\t2\t" in found


def test_arguments_that_are_no_text(tmp_path, capsys):
    model = made(tmp_path / "m", GPT2)
    for words in (["generate", model, "--prompt", "\udcff"], ["train", "a\udc80.toml"]):
        refused(capsys, f"argument {len(words)} of the command is not UTF-8: b'", *words)


# ---- score -----------------------------------------------------------------------------------


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


def test_scores_of_a_language_model(tmp_path, capsys):
    folder = byte_tokenizer(made(tmp_path / "m", GPT2))
    file = written(tmp_path / "lines", "hello\nhällo wörld\r\nx\n")
    rows = table(run(capsys, "score", folder, file, "--batch", 2))
    assert [r[0] for r in rows] == ["1", "2", "3", "total"]
    assert [r[1] for r in rows] == ["5", "13", "1", "19"]
    tokenizer = open_model(folder).tokenizer()
    for row, text in zip(rows, ("hello", "hällo wörld", "x"), strict=False):
        ids = tokenizer.encoded(text).ids
        logs = log_probabilities(folder, GPT2, [256, *ids[:-1]])
        expected = sum(logs[i, t] for i, t in enumerate(ids))
        assert float(row[2]) == pytest.approx(expected, abs=2e-4)
        assert float(row[3]) == pytest.approx(math.exp(-expected / len(ids)), rel=1e-4)
    assert float(rows[3][2]) == pytest.approx(sum(float(r[2]) for r in rows[:3]), abs=3e-4)
    for layout in ("storage", "", "batch:all", "vocab:all"):
        same(table(run(capsys, "score", folder, file, "--layout", layout)), rows)
    mesh = ("--mesh", "rows:2;cols:2", "--layout", "2d")
    same(table(run(capsys, "score", folder, file, *mesh)), rows)


def test_scores_of_a_masked_model(tmp_path, capsys):
    folder = made(tmp_path / "m", ESM)
    (folder / "vocab.txt").write_text("\n".join(LETTERS + ["<null_1>"] * (33 - len(LETTERS))))
    file = written(tmp_path / "lines", "LAGV\nMEEPQSDPSV\n")
    rows = table(run(capsys, "score", folder, file))
    assert [r[1] for r in rows] == ["4", "10", "14"]
    ids = [0, 4, 5, 6, 7, 2]
    expected = 0.0
    for k in range(1, 5):
        hidden = [32 if i == k else t for i, t in enumerate(ids)]
        expected += log_probabilities(folder, ESM, hidden)[k, ids[k]]
    assert float(rows[0][2]) == pytest.approx(expected, abs=2e-4)
    refused(capsys, "bad:1 has 'J', '*', which the tokenizer", "score", folder, written(tmp_path / "bad", "LAJG*J\n"))
    again = table(run(capsys, "score", folder, tmp_path / "bad", "--allow-unknown"))
    assert again[0][1] == "6"


def test_scores_of_pairs(tmp_path, capsys):
    folder = made(tmp_path / "m", T5)
    file = written(tmp_path / "pairs", "5 6 7 1\t8 9 1\n4 1\t3 2 5 6 1\n")
    rows = table(run(capsys, "score", folder, file, "--token-ids"))
    assert [r[1] for r in rows] == ["3", "5", "8"]
    logs = log_probabilities(folder, T5, [0, 8, 9], [5, 6, 7, 1])
    expected = logs[0, 8] + logs[1, 9] + logs[2, 1]
    assert float(rows[0][2]) == pytest.approx(expected, abs=2e-4)
    for text, message in (
        ("5 6\n", "pairs:1 has 1 columns. Write a source, one tab"),
        ("5\t6\n1\t2\t3\n", "pairs:2 has 3 columns."),
        ("5\t \n", "pairs:1 has 2 columns, one of them empty"),
        ("5\t" + "6 " * 21 + "\n", "the target of "),
        ("6 " * 21 + "\t5\n", "the source of "),
    ):
        refused(capsys, message, "score", folder, written(file, text), "--token-ids")


def test_buckets_hold_every_length(tmp_path):
    model = open_model(made(tmp_path / "m", GPT2))
    scorer = Scorer(model, mm.SimulatedMesh("all:1"), batch=3)
    draw = np.random.default_rng(1)
    texts = [[int(t) for t in draw.integers(0, 300, n)] for n in (2, SHORTEST, 25, 17, 18, 3, 2)]
    lines = [Line(i + 1, t, [False] * len(t), []) for i, t in enumerate(texts)]
    found = scorer.scores(lines)
    assert [s.tokens for s in found] == [len(t) - 1 for t in texts]
    alone = [scorer.scores([line])[0].log_likelihood for line in lines]
    np.testing.assert_allclose([s.log_likelihood for s in found], alone, rtol=1e-5)
    assert total(found).tokens == sum(len(t) - 1 for t in texts)
    assert len(scorer._steps) == 2  # of 16 and of 24 positions


def test_lines_that_cannot_be_used(tmp_path, capsys):
    folder = byte_tokenizer(made(tmp_path / "m", GPT2))
    file = tmp_path / "lines"
    for text, message in (
        (b"", "lines is empty."),
        (b"a\n\nb\n", "lines:2 is empty."),
        (b"a\n \t \n", "lines:2 is empty."),
        (b"ab\xffc\n", "lines:1 is not UTF-8: byte 0xff at 3."),
        (b"ok\n" + b"x" * 25, "lines:2 has 26 tokens, the model takes 25. Shorten it, or give"),
    ):
        refused(capsys, message, "score", folder, written(file, text))
    out = run(capsys, "score", folder, file, "--truncate")
    assert out.endswith("note: 1 tokens of 1 lines were left out (--truncate)\n")
    assert table(out)[1][1] == "24"
    for text, message in (
        ("1 2 x\n", "lines:1 has 'x', which is not a token id."),
        ("1 -2\n", "lines:1 has '-2', which is not a token id."),
        ("1 2\n1 300\n", "lines:2 has token 300, but the model has 300, from 0."),
    ):
        refused(capsys, message, "score", folder, written(file, text), "--token-ids")
    refused(capsys, "none cannot be read", "score", folder, tmp_path / "none")
    refused(capsys, "Give one of them", "score", folder, file, "--token-ids", "--tokenizer", folder)
    refused(capsys, "batches of 0 rows", "score", folder, written(file, "a"), "--batch", 0)
    refused(capsys, "which has one axis", "score", folder, file, "--layout", "2d")


def test_models_that_cannot_be_used(tmp_path, capsys):
    file = written(tmp_path / "lines", "a\n")
    refused(capsys, "gone is missing.", "score", tmp_path / "gone", file)
    folder = made(tmp_path / "m", GPT2)
    refused(capsys, "m has no tokenizer (tokenizer.json,", "score", folder, file)
    (folder / "config.json").unlink()
    refused(capsys, "there is no config.json next to", "score", folder, file)
    (folder / "config.json").write_text("[]")
    refused(capsys, "it is not a table", "score", folder, file)
    (folder / "config.json").write_text("{")
    refused(capsys, "config.json cannot be read", "score", folder, file)
    (folder / "config.json").write_text(json.dumps({**GPT2, "n_layer": 2}))
    written(file, "1 2\n")
    refused(capsys, "lacks 'transformer.h.1", "score", folder, file, "--token-ids")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(capsys, "model.safetensors is damaged: it ends within tensor", "score", folder, file)
    masked = made(tmp_path / "e", {k: v for k, v in ESM.items() if k != "mask_token_id"} | {"token_dropout": False})
    refused(capsys, "no mask_token_id", "score", masked, written(file, "5 6"), "--token-ids")


@pytest.mark.matrix
def test_runs_of_both_kinds(tmp_path, capsys, simulated_training):
    """A language model and a translation model of our own, without any other files."""
    config = settings_file(
        tmp_path, **{"model.d_model": 16, "model.d_ff": 32, "model.heads": 2, "model.d_kv": 8, "model.layers": 1}
    )
    run(capsys, "train", config, "--out", tmp_path / "lm")
    file = written(tmp_path / "lines", "the sea\nthe sky and\n")
    assert [r[1] for r in table(run(capsys, "score", tmp_path / "lm", file))] == ["6", "10", "16"]
    refused(
        capsys, "lines:1: character 'Z' is not among the", "score", tmp_path / "lm", written(tmp_path / "lines", "Z\n")
    )
    assert run(capsys, "generate", tmp_path / "lm", "--prompt", "the", "--tokens", 4).strip("\n")
    texts = [f"{k:b}".replace("0", "a").replace("1", "b") for k in range(2, 200)]
    written(tmp_path / "source", "\n".join(texts) + "\n")
    written(tmp_path / "target", "\n".join(t.upper() for t in texts) + "\n")
    run(
        capsys,
        "train",
        config,
        "--out",
        tmp_path / "mt",
        "--set",
        "task=translation",
        "--set",
        f"translation.source={tmp_path / 'source'}",
        "--set",
        "train.steps=2",
        "--set",
        f"translation.target={tmp_path / 'target'}",
        "--set",
        "translation.sentences=2",
        "--set",
        "translation.least_words=1",
        "--set",
        "data.held_out_fraction=0.4",
    )
    pairs = written(tmp_path / "pairs", "ab\tAB\nba\tBABA\n")
    rows = table(run(capsys, "score", tmp_path / "mt", pairs))
    assert [r[1] for r in rows] == ["3", "5", "8"]  # the end of each target counts
    found = run(capsys, "generate", tmp_path / "mt", "--prompt", "ab", "--tokens", 5)
    assert not found.strip("\n").strip("AB ab")
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    refused(capsys, "there is no checkpoint in", "score", tmp_path / "empty", file)


# ---- generate --------------------------------------------------------------------------------


def test_generate(tmp_path, capsys):
    folder = byte_tokenizer(made(tmp_path / "m", GPT2))
    common = ("generate", folder, "--tokens", 6, "--stop", 299)
    text = run(capsys, *common, "--prompt", "hello", "--temperature", 0)
    assert run(capsys, *common, "--prompt", "hello", "--temperature", 0, "--stream") == text
    file = written(tmp_path / "prompts", "hello\nsea\n")
    rows = [json.loads(r) for r in run(capsys, *common, "--prompts", file, "--temperature", 0).splitlines()]
    assert [r["line"] for r in rows] == [1, 2]
    assert rows[0]["text"] == text.rstrip("\n") or rows[0]["text"] + "\n" == text
    tokens = open_model(folder).tokenizer().encoded("hello").ids
    for expected in rows[0]["tokens"]:  # each the most probable after those before it
        logs = log_probabilities(folder, GPT2, tokens)[-1, :256]
        assert expected == int(logs.argmax())
        tokens.append(expected)
    drawn = run(capsys, *common, "--prompts", file, "--seed", 3, "--top-k", 20)
    for layout in ("storage", "", "heads:all"):
        again = run(capsys, *common, "--prompts", file, "--seed", 3, "--top-k", 20, "--layout", layout)
        assert again == drawn
    assert run(capsys, *common, "--prompts", file, "--seed", 4, "--top-k", 20) != drawn
    ids = written(tmp_path / "ids", "1 2 3\n")
    found = json.loads(run(capsys, *common, "--prompts", ids, "--token-ids"))
    assert [int(t) for t in found["text"].split()] == found["tokens"]
    beams = run(capsys, *common, "--prompt", "hello", "--beams", 3).split("\n")
    scores = [float(b.split("\t")[0]) for b in beams if "\t" in b]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    best = json.loads(run(capsys, *common, "--prompts", ids, "--beams", 2, "--token-ids"))
    assert len(best["beams"]) == 2 and len(best["beams"][0]["tokens"]) <= 6


def test_generate_from_a_source(tmp_path, capsys):
    folder = made(tmp_path / "m", T5)
    file = written(tmp_path / "sources", "5 6 7 1\n4 1\n")
    common = ("generate", folder, "--prompts", file, "--token-ids", "--tokens", 4)
    rows = [json.loads(r) for r in run(capsys, *common, "--temperature", 0).splitlines()]
    tokens = [0]
    for expected in rows[0]["tokens"]:
        assert expected == int(log_probabilities(folder, T5, tokens, [5, 6, 7, 1])[-1].argmax())
        tokens.append(expected)


def test_what_cannot_be_generated(tmp_path, capsys):
    folder = made(tmp_path / "m", GPT2)
    ids = written(tmp_path / "ids", "1 2 3\n")
    common = ("generate", folder, "--prompts", ids, "--token-ids")
    refused(capsys, "--tokens is 0", *common, "--tokens", 0)
    refused(capsys, "The best beam is known only at the end", *common, "--beams", 2, "--stream")
    refused(
        capsys,
        "ids:1 has 25 tokens, the model takes 24",
        "generate",
        folder,
        "--prompts",
        written(tmp_path / "ids", "1 " * 25),
        "--token-ids",
    )
    masked = made(tmp_path / "e", ESM)
    refused(capsys, "which does not continue texts", "generate", masked, "--prompt", "A")


# ---- fine-tuning and writing back ------------------------------------------------------------


def settings_file(tmp_path, **sections) -> Path:
    corpus = written(tmp_path / "corpus.txt", "the sea and the sky\n" * 60)
    text = f'data.corpus = "{corpus}"\ndata.held_out_fraction = 0.2\n'
    text += "train.steps = 3\ntrain.batch = 2\ntrain.plot = false\nsample.tokens = 0\n"
    text += "evaluate.every = 0\nmodel.length = 12\n"
    text += "".join(f"{k} = {v}\n" for k, v in sections.items())
    return written(tmp_path / "config.toml", text)


@pytest.fixture
def simulated_training(monkeypatch):
    monkeypatch.setattr("meshmpi.transformer.training.run.make_mesh", lambda s: mm.SimulatedMesh(s.shape or "all:2"))


def held_out_loss(out: str) -> float:
    line = next(x for x in reversed(out.splitlines()) if x.startswith("held-out loss"))
    return float(line.split(": ")[1].split()[0])


def test_fine_tuning_and_writing_back(tmp_path, capsys, simulated_training):
    folder = byte_tokenizer(made(tmp_path / "m", GPT2))
    config = settings_file(tmp_path)
    common = ("train", config, "--init-from", folder, "--set", "optimizer.learning_rate=0.01")
    out = run(capsys, *common, "--out", tmp_path / "run")
    assert f"first values are those of {folder}" in out
    # Before any step the model is the checkpoint's.
    before = run(capsys, *common, "--out", tmp_path / "zero", "--set", "train.steps=0")
    file = written(tmp_path / "lines", "the sea and\n")
    assert held_out_loss(out) < held_out_loss(before)
    untouched = table(run(capsys, "score", tmp_path / "zero", file))
    tuned = table(run(capsys, "score", tmp_path / "run", file))
    assert untouched[0][1] == tuned[0][1] == "10"  # a run has no token before the first
    assert float(tuned[0][2]) > float(untouched[0][2])
    logs = log_probabilities(folder, GPT2, open_model(folder).tokenizer().encoded("the sea an").ids)
    ids = open_model(folder).tokenizer().encoded("the sea and").ids
    expected = sum(logs[i, t] for i, t in enumerate(ids[1:]))
    assert float(untouched[0][2]) == pytest.approx(expected, abs=2e-4)
    # Written back, only the first positions have changed.
    run(capsys, "export", tmp_path / "run", tmp_path / "out", "--like", folder, "--max-shard", "20 KB")
    old, new = load_file(folder / "model.safetensors"), {}
    for part in (tmp_path / "out").glob("*.safetensors"):
        new |= load_file(part)
    assert sorted(old) == sorted(new)
    positions = "transformer.wpe.weight"
    np.testing.assert_array_equal(new[positions][12:], old[positions][12:])
    assert not np.array_equal(new[positions][:12], old[positions][:12])
    assert (tmp_path / "out" / "tokenizer.json").exists()
    scored = table(run(capsys, "score", tmp_path / "out", file))
    assert float(scored[0][2]) > float(table(run(capsys, "score", folder, file))[0][2])
    # A run goes on from a run, and resumes.
    again = run(
        capsys, "train", config, "--init-from", tmp_path / "run", "--out", tmp_path / "b", "--set", "train.steps=0"
    )
    assert held_out_loss(again) == pytest.approx(held_out_loss(out), rel=1e-5)
    more = run(capsys, *common, "--out", tmp_path / "run", "--resume", "--set", "train.steps=4")
    assert "resumed from" in more and "first values" not in more


def test_a_given_vocabulary_replaces_the_tokenizer(tmp_path, capsys, simulated_training):
    folder = made(tmp_path / "m", GPT2)
    config = settings_file(tmp_path, **{"data.vocabulary": '"bytes"'})
    run(capsys, "train", config, "--init-from", folder, "--out", tmp_path / "run")
    found = open_model(tmp_path / "run")
    assert found.manifest.about["vocabulary"] == {"kind": "bytes"}
    assert (found.config.length, found.config.vocab) == (12, 300)


def test_what_cannot_be_fine_tuned(tmp_path, capsys):
    config = settings_file(tmp_path)
    for name, values, kind in (("e", ESM, "encoder"), ("t", T5, "encoder_decoder")):
        folder = made(tmp_path / name, values)
        refused(
            capsys,
            f"is of kind {kind}, the task is 'lm'",
            "train",
            config,
            "--init-from",
            folder,
            "--out",
            tmp_path / "run",
        )
    folder = made(tmp_path / "m", GPT2)
    refused(capsys, "m has no tokenizer", "train", config, "--init-from", folder, "--out", tmp_path / "run")
    refused(capsys, "m exists already", "export", folder, folder, "--like", folder)


def test_a_dry_run_has_the_sizes_of_the_checkpoint(tmp_path, capsys):
    folder = byte_tokenizer(made(tmp_path / "m", GPT2))
    out = run(capsys, "train", settings_file(tmp_path), "--init-from", folder, "--dry-run")
    count = mm.transformer.parameter_count(architecture(GPT2).config.with_options(length=12))
    assert f"{count:,}" in out


# ---- under mpirun ----------------------------------------------------------------------------


def on_ranks(tmp_path, n, *words):
    environment = {"PYTHONPATH": os.getcwd(), "MESHMPI_CACHE": str(tmp_path / "cache")}
    return launch(
        n, ["-m", "meshmpi", *map(str, words)], timeout_seconds=120, capture_output=True, environment=environment
    )


@pytest.mark.matrix
def test_the_same_on_several_ranks(tmp_path, capsys):
    folder = made(tmp_path / "m", GPT2)
    file = written(tmp_path / "lines", "1 2 3 4\n5 6\n7 8 9 10 11 12\n")
    score = ("score", folder, file, "--token-ids")
    expected = table(run(capsys, *score))
    done = on_ranks(tmp_path, 2, *score)
    assert done.returncode == 0, done.stderr
    same(table(done.stdout), expected)
    done = on_ranks(tmp_path, 4, *score, "--mesh", "rows:2;cols:2", "--layout", "2d")
    assert done.returncode == 0, done.stderr
    same(table(done.stdout), expected)
    generate = ("generate", folder, "--prompts", file, "--token-ids", "--tokens", 5)
    expected = run(capsys, *generate)
    done = on_ranks(tmp_path, 2, *generate, "--layout", "storage")
    assert (done.returncode, done.stdout) == (0, expected), done.stderr


@pytest.mark.matrix
def test_mistakes_are_told_once(tmp_path):
    folder = made(tmp_path / "m", GPT2)
    file = written(tmp_path / "lines", "1 2 3 4\n\n")
    done = on_ranks(tmp_path, 2, "score", folder, file, "--token-ids")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.count("lines:2 is empty.") == 1


@pytest.mark.matrix
def test_fine_tuning_on_two_ranks(tmp_path, capsys, simulated_training):
    folder = made(tmp_path / "m", GPT2)
    config = settings_file(tmp_path, **{"data.vocabulary": '"bytes"'})
    common = ("train", config, "--init-from", folder)
    expected = held_out_loss(run(capsys, *common, "--out", tmp_path / "simulated"))
    done = on_ranks(tmp_path, 2, *common, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert held_out_loss(done.stdout) == pytest.approx(expected, rel=1e-5)
    done = on_ranks(tmp_path, 2, "export", tmp_path / "run", tmp_path / "out", "--like", folder, "--layout", "storage")
    assert done.returncode == 0, done.stderr
    assert sorted(load_file(tmp_path / "out" / "model.safetensors")) == sorted(load_file(folder / "model.safetensors"))


def test_what_a_checkpoint_says_of_generation_and_is_not_done_is_named():
    options = Namespace(temperature=0.7, top_k=5, top_p=1.0, beams=0, tokens=9)
    same = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 5,
        "max_new_tokens": 9,
        "repetition_penalty": 1.0,
        "suppress_tokens": [],
        "num_beams": 1,
    }
    assert otherwise(same, options) == ""
    other = {**same, "top_k": 50, "num_beams": 4, "forced_bos_token_id": 3, "suppress_tokens": [1]}
    said = "num_beams=4, top_k=50, forced_bos_token_id=3, suppress_tokens=[1]"
    assert otherwise(other, options) == said
    greedy = Namespace(temperature=0.0, top_k=0, top_p=1.0, beams=0, tokens=9)
    assert otherwise({"top_k": 50, "do_sample": False}, greedy) == ""
    assert otherwise({"do_sample": True}, greedy) == "do_sample=True"
