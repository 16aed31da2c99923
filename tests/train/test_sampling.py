"""Sampling: the same seed gives the same text in every layout; a learnt text comes back."""

from __future__ import annotations

import pytest

import meshmpi as mm
from meshmpi import cli
from meshmpi.errors import DataError
from meshmpi.transformer.decoding.decoding import Sampling
from meshmpi.transformer.decoding.sampling import Sampler
from meshmpi.transformer.models import TransformerConfig
from meshmpi.transformer.text.characters import ByteVocabulary, CharacterVocabulary
from meshmpi.transformer.training.config import load
from meshmpi.transformer.training.run import train
from meshmpi.transformer.training.settings import Settings

LETTERS = CharacterVocabulary("abcdefghijk\n")
CONFIG = TransformerConfig(vocab=12, length=6, d_model=12, d_ff=10, heads=3, d_kv=4, layers=1, initializers="paper")


def sampler(mesh="all:1", layout="", seed=0, temperature=1.0, vocabulary=LETTERS, **options):
    config = CONFIG.with_options(**options)
    return Sampler(config, vocabulary, mm.SimulatedMesh(mesh), layout, sampling=Sampling(temperature), seed=seed)


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ("all:2", "batch:all"),
        ("all:3", "length:all"),
        ("rows:2;cols:3", "d_model:rows;heads:cols;d_ff:cols;vocab:cols"),
        ("all:5", "vocab:all"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_same_text_in_every_layout(mesh, layout, temperature):
    expected = sampler(temperature=temperature).text("abc", 12)
    assert len(expected) == 12
    assert sampler(mesh, layout, temperature=temperature).text("abc", 12) == expected


def test_seed_and_temperature():
    assert sampler().text("a", 20) == sampler().text("a", 20)
    # Two runs differ in their noise alone: the weights of a step also depend on its seed.
    one, two = sampler(seed=0), sampler(seed=1)
    two.variables.assign({name: one.variables[name] for name in one.variables})
    assert one.text("a", 20) != two.text("a", 20)
    cold = sampler(temperature=0.0)
    assert cold.text("a", 5) == cold.text("a", 5)


def test_window_slides_and_prompt_may_be_empty_or_long():
    s = sampler()
    assert len(s.text("", 3)) == 3
    prompt = "abcdefghijkabcdef"
    assert len(s.text(prompt, 10)) == 10
    cold = sampler(temperature=0.0)
    # Only the last window of the prompt counts.
    assert cold.text("kkkk" + prompt[-6:], 4) == cold.text(prompt[-6:], 4)


def test_unknown_character():
    with pytest.raises(DataError, match="'Z' is not among the 12 characters"):
        sampler().text("Z", 3)


def test_tokens_beyond_the_vocabulary_are_never_drawn():
    s = sampler(vocab=20)
    assert len(s.text("a", 40)) == 40


def test_a_learnt_text_comes_back(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MESHMPI_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("abcdefghij\n" * 200)
    settings = load(
        Settings,
        None,
        [
            f"data.corpus={tmp_path / 'text.txt'}",
            "data.vocabulary=bytes",
            "model.length=12",
            "model.d_model=32",
            "model.d_ff=32",
            "model.heads=2",
            "model.d_kv=16",
            "model.layers=1",
            "model.norm=layer",
            "train.steps=150",
            "train.batch=8",
            "train.plot=false",
            "evaluate.every=0",
            "sample.tokens=0",
            "optimizer.learning_rate=0.01",
        ],
    )
    result = train(settings, tmp_path / "run", mesh=mm.SimulatedMesh("a:2"), say=lambda line: None)
    assert result.evaluation.loss < 0.1
    words = ["sample", str(tmp_path / "run"), "--prompt", "abc", "--tokens", "12"]
    assert cli.main([*words, "--temperature", "0.1"]) == 0
    assert capsys.readouterr().out == "abcdefghij\nabcd\n"
    greedy = [*words, "--temperature", "0", "--stop", "xyz", "--stop", "hi", "--stream"]
    assert cli.main(greedy) == 0
    assert capsys.readouterr().out == "abcdefg\n"
    assert cli.main([*words, "--top-k", "1"]) == 0
    assert capsys.readouterr().out == "abcdefghij\nabcd\n"
    assert cli.main([*words, "--tokens", "5", "--beams", "2"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith(" abcdefgh") and float(first.split()[0]) >= float(second.split()[0])
    assert cli.main([*words, "--beams", "2"]) == 1
    assert "prompt 0 has 3 tokens; with 12 more" in capsys.readouterr().err
    assert cli.main([*words, "--top-p", "0"]) == 1
    assert "top_p 0.0" in capsys.readouterr().err


def test_bytes_that_are_no_text_are_shown():
    s = sampler(vocabulary=ByteVocabulary(), vocab=256)
    tokens = list(s.tokens("a", 30))
    assert s.text("a", 30) == ByteVocabulary().decode(tokens)
    assert "\ufffd" in s.text("a", 30)


def test_pieces_are_whole_letters_and_end_before_a_stop_text():
    s = sampler(vocabulary=ByteVocabulary(), vocab=256)
    letters = "éßñ€𝄞ab"
    drawn = list(letters.encode())
    s.tokens = lambda prompt, count: iter(drawn[:count])
    pieces = list(s.pieces("", len(drawn)))
    assert [p for p in pieces if p] == list(letters)
    assert s.text("", len(drawn), ["€𝄞a"]) == "éßñ"
    # The beginning of a stop text is kept back until it is known not to be one.
    assert [p for p in s.pieces("", len(drawn), ["ña"]) if p] == ["é", "ß", "ñ€", "𝄞", "a", "b"]
    assert s.text("", 5, ["ñ"]) == "éß\ufffd"
