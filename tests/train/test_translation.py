"""Translation: pairs without leakage, packed rows, a task that learns, equal in every layout."""

from __future__ import annotations

import random

import numpy as np
import pytest

import meshmpi as mm
from meshmpi import checkpoint
from meshmpi.errors import CheckpointError, ConfigError, DataError
from meshmpi.launch.launch import launch
from meshmpi.training.metrics import read_metrics
from meshmpi.transformer.text.characters import END, PADDING
from meshmpi.transformer.text.vocabulary import build_ended, restore_vocabulary
from meshmpi.transformer.training.config import load
from meshmpi.transformer.training.saved import evaluate_run, open_run
from meshmpi.transformer.training.settings import Settings
from meshmpi.transformer.translation.data import prepare
from meshmpi.transformer.translation.packing import PackedRows, RowStream, TokenPairs, pack
from meshmpi.transformer.translation.translator import Translator
from tests.train.small import losses, run_of

LETTERS = "abcdefg"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHMPI_CACHE", str(tmp_path / "cache"))
    source, target = reversals(400)
    (tmp_path / "source.txt").write_text("\n".join(source) + "\n")
    (tmp_path / "target.txt").write_text("\n".join(target) + "\n")


def reversals(count, longest=4, seed=3):
    """Sentences of letters, and the same read from behind in capitals."""
    draw = random.Random(seed)
    lines = ["".join(draw.choices(LETTERS, k=draw.randint(2, longest))) for _ in range(count)]
    return lines, [line[::-1].upper() for line in lines]


def small(tmp_path, *overrides):
    return [
        "task=translation",
        f"translation.source={tmp_path / 'source.txt'}",
        f"translation.target={tmp_path / 'target.txt'}",
        "translation.least_words=1",
        "data.vocabulary=characters",
        "data.held_out_fraction=0.25",
        "model.length=12",
        "model.d_model=16",
        "model.d_ff=32",
        "model.heads=2",
        "model.d_kv=8",
        "model.layers=1",
        "train.steps=6",
        "train.batch=6",
        "train.log_every=2",
        "train.plot=false",
        "evaluate.every=3",
        "model.residual_dropout=0.1",
        "model.label_smoothing=0.1",
        "translation.sentences=3",
        "translation.beams=2",
        "optimizer.learning_rate=0.01",
        *overrides,
    ]


def settings(tmp_path, *overrides):
    return load(Settings, None, small(tmp_path, *overrides))


def run(tmp_path, name, *overrides, mesh="all:1", resume=False):
    return run_of(small(tmp_path, *overrides), tmp_path / name, mesh, resume)


# ---- the task --------------------------------------------------------------------------------


def test_a_run_learns_to_reverse(tmp_path):
    result, lines = run(
        tmp_path,
        "run",
        "train.steps=500",
        "train.batch=10",
        "model.residual_dropout=0.0",
        "model.d_model=32",
        "model.d_ff=64",
        "model.layers=2",
        "evaluate.every=0",
        "translation.sentences=40",
        "optimizer.learning_rate=0.01*linear_warmup(30)*linear_decay(500, 400)",
    )
    assert result.evaluation.loss < 0.25
    assert result.evaluation.share == 1.0
    text = "\n".join(lines)
    assert "rows" in text and "of them padding" in text and "steps see all" in text
    shown = [line for line in result.sample.splitlines() if line.startswith("  ")]
    right = sum(a[5:] == b[5:] for a, b in zip(shown[::2], shown[1::2], strict=True))
    assert right >= 4  # of 5 that are shown
    assert result.measures["sentences"] == 40 and result.measures["chrf"] > 60
    records = read_metrics(tmp_path / "run")
    assert records[-1]["chrf"] == result.measures["chrf"]

    saved = open_run(tmp_path / "run")
    found, sample = evaluate_run(
        saved, saved.settings, mm.SimulatedMesh("all:2"), "heads:all;d_ff:all;vocab:all", print
    )
    assert abs(found.loss - result.evaluation.loss) < 1e-5
    assert sample.text == result.sample
    with pytest.raises(CheckpointError, match="trained on other data"):
        other = settings(tmp_path, "data.held_out_fraction=0.5")
        evaluate_run(saved, other, mm.SimulatedMesh("all:1"), "", print)


LAYOUTS = [
    ["mesh.shape=a:3"],
    ["mesh.shape=a:2", "mesh.layout=heads:a;d_ff:a;vocab:a"],
    ["mesh.shape=a:2;b:2", "mesh.layout=length:a;source_length:b"],
    ["mesh.shape=rows:2;cols:2", "mesh.layout=batch:rows;heads:cols;d_ff:cols;vocab:cols"],
    ["mesh.shape=a:2", "mesh.layout=batch:a", "mesh.storage=d_model:a"],
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda words: words[-1])
def test_every_layout_trains_alike(tmp_path, layout):
    """Dropout, label smoothing, packing and evaluation included; batch 6 over 3 ranks or 2."""
    more = ["model.dtype=float64", "translation.sentences=0", "train.steps=4"]
    run(tmp_path, "one", *more)
    run(tmp_path, "other", *layout, *more)
    for key in ("loss", "held_out_loss"):
        expected = losses(tmp_path / "one", key)
        np.testing.assert_allclose(losses(tmp_path / "other", key), expected, rtol=1e-6)


def test_resume_is_as_if_never_stopped(tmp_path):
    run(tmp_path, "whole")
    run(tmp_path, "parts", "train.steps=4")
    _, lines = run(tmp_path, "parts", resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert any("resumed from" in line and "step 4" in line for line in lines)
    with pytest.raises(CheckpointError, match=r"another text or vocabulary: '.*source.txt and"):
        run(tmp_path, "parts", "translation.most_words=1", "data.held_out_fraction=0.5", resume=True)


def test_microbatches_are_one_batch(tmp_path):
    """Also where they hold different numbers of targets."""
    more = ["model.residual_dropout=0.0", "translation.sentences=0", "model.dtype=float64"]
    run(tmp_path, "one", *more)
    run(tmp_path, "three", *more, "optimizer.microbatches=3")
    np.testing.assert_allclose(losses(tmp_path / "three"), losses(tmp_path / "one"), rtol=1e-6)


@pytest.mark.parametrize("packing", ["true", "false"])
def test_packing_changes_no_held_out_loss(tmp_path, packing):
    more = ["train.steps=0", "translation.sentences=0", "model.dtype=float64"]
    packed, _ = run(tmp_path, "packed", *more)
    other, _ = run(tmp_path, "other", *more, f"translation.packing={packing}", "evaluate.batch=5")
    # float32 sums of losses in other orders
    assert other.evaluation.loss == pytest.approx(packed.evaluation.loss, rel=1e-6)
    assert other.evaluation.tokens == packed.evaluation.tokens


def test_without_sacrebleu_a_run_is_not_lost(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sacrebleu.metrics.bleu", None)
    result, lines = run(tmp_path, "run", "train.steps=1")
    assert result.sample and not result.measures
    assert any("no BLEU" in line and "meshmpi[translate]" in line for line in lines)


@pytest.mark.matrix
def test_under_mpirun_as_on_the_simulated_mesh(tmp_path):
    run(tmp_path, "simulated")
    words = [f"--set={item}" for item in small(tmp_path)]
    config = tmp_path / "config.toml"
    config.write_text("")
    done = launch(
        2,
        ["-m", "meshmpi", "train", str(config), *words, "--out", str(tmp_path / "run")],
        timeout_seconds=240,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(tmp_path / "simulated"), rtol=1e-5)
    (tmp_path / "in.txt").write_text("abc\n\ngab\n")
    command = ["-m", "apps.transformer", "translate"]
    again = launch(
        2,
        [*command, "translate", str(tmp_path / "run"), "--input", str(tmp_path / "in.txt")],
        timeout_seconds=240,
        capture_output=True,
    )
    assert again.returncode == 0, again.stderr
    saved = open_run(tmp_path / "run")
    translator = Translator(saved.settings, saved.config, saved.vocabulary, mm.SimulatedMesh("a:1"))
    checkpoint.load(saved.manifest, translator.variables, extra=True)
    assert again.stdout.splitlines() == translator.translate(["abc", "", "gab"])


# ---- mistakes --------------------------------------------------------------------------------


def test_mistakes_of_settings_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"'model.padding_id' is 3; translation pads with 0"):
        run(tmp_path, "run", "model.padding_id=3")
    with pytest.raises(ConfigError, match="Give both files"):
        run(tmp_path, "run", "translation.target=")
    with pytest.raises(DataError, match="there is no file 'nowhere.txt'"):
        run(tmp_path, "run", "translation.target=nowhere.txt")
    plain = ["translation.source=", "translation.target="]
    with pytest.raises(DataError, match="Did you mean 'debian-en-de'"):
        run(tmp_path, "run", *plain, "translation.pairs=debian-en-ed")
    with pytest.raises(DataError, match=r"none of the \d+ training pairs fits into a row of 2"):
        run(tmp_path, "run", "model.length=2")
    with pytest.raises(ConfigError, match="local_window is 3"):
        run(tmp_path, "run", "model.local_window=3")


def test_lines_that_cannot_be_translated_are_named(tmp_path):
    made = settings(tmp_path)
    data = prepare(made)
    config = mm.transformer.TransformerConfig(
        vocab=data.vocabulary.size, length=6, d_model=8, d_ff=8, heads=1, d_kv=4, layers=1, padding_id=0
    )
    translator = Translator(made, config, data.vocabulary, mm.SimulatedMesh("all:1"))
    translator.check(["abc", "", "fga"], "in.txt")
    with pytest.raises(DataError, match=r"in\.txt:2 has 8 tokens, the model takes 6"):
        translator.check(["abc", "abcdefg"], "in.txt")
    with pytest.raises(DataError, match=r"in\.txt:3 is written in cyrillic letters; .* latin"):
        translator.check(["abc", "", "где"], "in.txt")


# ---- packed rows -----------------------------------------------------------------------------


def pairs_of(lengths):
    """Pairs of sequences of these lengths, with numbers for tokens that tell where they belong."""
    tokens, starts = [], [0]
    for k, (a, b) in enumerate(lengths):
        tokens += [100 * k + 10 + i for i in range(a)] + [100 * k + 50 + i for i in range(b)]
        starts += [starts[-1] + a, starts[-1] + a + b]
    return TokenPairs(np.array(tokens, np.int32), np.array(starts))


LENGTHS = [(3, 2), (5, 5), (1, 1), (9, 2), (2, 4), (2, 9), (8, 8), (1, 3), (2, 2), (4, 1)]


@pytest.mark.parametrize("packed", [True, False])
def test_every_pair_is_in_one_row_and_whole(packed):
    pairs = pairs_of(LENGTHS)
    order = np.array([4, 2, 0, 1, 3, 9, 8, 7, 6, 5])
    rows = pack(pairs, 8, 8, order, packed)
    assert sorted(rows.order.tolist()) == [0, 1, 2, 4, 6, 7, 8, 9] and rows.left_out == 2
    assert len(rows) == 8 if not packed else len(rows) < 5
    held = dict.fromkeys(
        ["source", "source_segments", "source_places", "tokens", "targets", "segments", "places", "weights"]
    )
    made = PackedRows(pairs, rows, 8, 8).block(np.arange(len(rows)), held, "", 0.5)
    seen = []
    for r in range(len(rows)):
        for number in range(1, made["segments"][r].max() + 1):
            at, of = made["source_segments"][r] == number, made["segments"][r] == number
            source, target = made["source"][r, at], made["targets"][r, of]
            pair = int(source[0]) // 100
            assert (len(source), len(target)) == LENGTHS[pair]
            assert source.tolist() == [100 * pair + 10 + i for i in range(len(source))]
            assert target.tolist() == [100 * pair + 50 + i for i in range(len(target))]
            assert made["tokens"][r, of].tolist() == [PADDING, *target[:-1]]
            assert made["places"][r, of].tolist() == list(range(len(target)))
            assert made["source_places"][r, at].tolist() == list(range(len(source)))
            seen.append(pair)
    assert sorted(seen) == sorted(rows.order.tolist())
    np.testing.assert_array_equal(made["weights"], 0.5 * (made["segments"] > 0))
    for name in ("tokens", "targets", "places"):
        assert not made[name][made["segments"] == 0].any()


def test_a_rank_gets_its_part_of_a_batch():
    pairs = pairs_of(LENGTHS)
    made = PackedRows(pairs, pack(pairs, 9, 9, np.arange(10), True), 9, 9)
    numbers = np.array([2, 0, -1, 1])
    names = ["source", "targets", "weights", "segments"]
    whole = made.block(numbers, dict.fromkeys(names), "", 1.0)
    assert not whole["source"][2].any() and not whole["weights"][2].any()
    ranges = {
        "source": ((1, 4), (2, 5)),
        "targets": ((0, 2), (0, 9)),
        "weights": ((3, 3), (0, 9)),
        "segments": ((2, 4), (8, 9)),
    }
    part = made.block(numbers, ranges, "", 1.0)
    for name, (rows, columns) in ranges.items():
        np.testing.assert_array_equal(part[name], whole[name][slice(*rows), slice(*columns)])


def test_all_rows_come_once_in_a_round():
    stream = RowStream(7, 3, seed=5)
    numbers = np.concatenate([stream.numbers(step) for step in range(7)])
    rounds = numbers.reshape(3, 7)
    assert all(sorted(r) == list(range(7)) for r in rounds.tolist())
    assert rounds[0].tolist() != rounds[1].tolist()
    again = RowStream(7, 3, seed=5)  # as after a resume: other steps were never asked for
    np.testing.assert_array_equal(again.numbers(5), numbers[15:18])
    assert RowStream(7, 3, seed=6).numbers(0).tolist() != numbers[:3].tolist()


def test_packing_wastes_little():
    draw = np.random.default_rng(0)
    lengths = np.minimum(draw.geometric(1 / 15, (3000, 2)) + 1, 90)
    pairs = pairs_of(lengths)
    made = PackedRows(pairs, pack(pairs, 96, 96, np.arange(3000), True), 96, 96)
    assert made.padding_share < 0.15
    alone = PackedRows(pairs, pack(pairs, 96, 96, np.arange(3000), False), 96, 96)
    assert alone.padding_share > 0.7


# ---- the vocabulary --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bytes", "characters", "bpe:300"])
def test_sentences_come_back(name):
    if name.startswith("bpe"):
        pytest.importorskip("sentencepiece")
    lines = [f"Die {k} Häuser sind größer als {k + 1} Bäume." for k in range(60)]
    vocabulary = build_ended(name, lines)
    restored = restore_vocabulary(vocabulary.state())
    for text in (lines[7], "Bäume sind 3 Häuser"):
        tokens = vocabulary.encode(text)
        assert tokens.min() > END and tokens.max() < vocabulary.size
        assert vocabulary.decode([*tokens, END, PADDING]) == text
        np.testing.assert_array_equal(restored.encode(text), tokens)
    if name.startswith("bpe"):
        assert vocabulary.size == 300


def test_data_are_prepared_once_and_damage_is_named(tmp_path):
    data = prepare(settings(tmp_path))
    assert data.report["found"] == 400
    held = {source for source, _ in data.sentences}
    decode = data.vocabulary.decode
    for k in range(len(data.train)):
        a, b, c = data.train.starts[2 * k : 2 * k + 3]
        assert decode(data.train.tokens[a:b]) == decode(data.train.tokens[b:c])[::-1].lower()
        assert decode(data.train.tokens[a:b]) not in held
    assert prepare(settings(tmp_path)).digest == data.digest
    (folder,) = (tmp_path / "cache" / "tokens").glob("pairs-*[!k]")
    (folder / "train.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"train.bin has 0 bytes, \d+ were.*Delete the folder"):
        prepare(settings(tmp_path))
