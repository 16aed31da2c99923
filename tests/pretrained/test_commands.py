"""score and generate: what they print, and every mistake they tell."""

from __future__ import annotations

import json
import math
from argparse import Namespace

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.commands.pretrained import otherwise
from meshmpi.transformer.pretrained.lines import Line
from meshmpi.transformer.pretrained.model import open_model
from meshmpi.transformer.pretrained.scoring import SHORTEST, Scorer, total
from tests.pretrained.command_line import (
    ESM,
    GPT2,
    LETTERS,
    T5,
    byte_tokenizer,
    log_probabilities,
    made,
    on_ranks,
    refused,
    run,
    same,
    settings_file,
    table,
    written,
)

pytestmark = pytest.mark.usefixtures("simulated")


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


# ---- under mpirun ----


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
