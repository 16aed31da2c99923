"""The protein app with models: training, its runs, checkpoints of transformers, real ranks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import meshmpi as mm
from apps.esm2 import fasta, layouts, models, scoring
from apps.esm2.__main__ import main
from apps.esm2.alphabet import CLS, EOS, MASK, PAD, TOKENS, numbers
from apps.esm2.inference import Inference, residue_losses
from apps.esm2.rows import windows
from apps.esm2.task import ProteinTask
from apps.esm2.weights import open_model
from meshmpi.errors import CheckpointError
from meshmpi.launch.launch import launch
from meshmpi.transformer.training.config import from_dict
from meshmpi.transformer.training.run import train
from meshmpi.transformer.training.settings import Settings
from meshmpi.transformer.training.trainer import Trainer
from tests.apps.test_esm2 import FAMILIES, SEQUENCES, relatives, written

ROOT = Path(__file__).parent.parent.parent
CONFIG = ROOT / "apps/esm2/configs/proteins.toml"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHMPI_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path) -> Path:
    return written(tmp_path / "some.fasta", SEQUENCES)


def settings(path: Path, **changes) -> Settings:
    """A run of a tiny model in float64 on the proteins of a file."""
    values = {
        "data": {"corpus": str(path), "held_out_fraction": 0.3},
        "model": {
            **models.OPTIONS,
            "length": 24,
            "d_model": 24,
            "d_ff": 40,
            "heads": 3,
            "d_kv": 8,
            "layers": 1,
            "dtype": "float64",
        },
        "optimizer": {"learning_rate": "0.01", "clip_norm": 1.0},
        "train": {"steps": 3, "batch": 6, "plot": False},
        "evaluate": {"every": 0, "batch": 4},
    }
    for key, value in changes.items():
        values[key] = {**values.get(key, {}), **value}
    return from_dict(Settings, values)


# ---- training ----------------------------------------------------------------------------------


def losses(tmp_path: Path, mesh: str, layout: str, storage: str = "", residual: str = "", on=None):
    path = tmp_path / "f.fasta"
    path = path if path.exists() else written(path, FAMILIES)
    placed = {"layout": layout, "storage": storage}
    found = settings(path, mesh=placed, model={"residual_constraint": residual})
    on = on or mm.SimulatedMesh(mesh)
    trainer = Trainer(found, on, tmp_path, lambda line: None, ProteinTask)
    steps = [trainer.one_step() for _ in range(3)]
    return steps, trainer._evaluator.evaluate()


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("one")
        patch.setenv("MESHMPI_CACHE", str(folder))
        return losses(folder, "all:1", "")


@pytest.mark.parametrize("name", ["2d", "megatron", "replicated"])
def test_training_is_the_same_in_every_layout(tmp_path, name, one_rank):
    s = layouts.splits(name, 4)
    steps, held_out = losses(tmp_path, s.mesh, s.layout, s.storage or "", s.residual)
    np.testing.assert_allclose(steps, one_rank[0], rtol=1e-9)
    assert held_out.loss == pytest.approx(one_rank[1].loss, rel=1e-6)  # summed in float32
    assert held_out.measures["unigram_perplexity"] == one_rank[1].measures["unigram_perplexity"]


@pytest.mark.matrix
def test_training_on_real_ranks(tmp_path, one_rank):
    code = (
        "import sys, pathlib, numpy as np, meshmpi as mm\n"
        "from tests.apps import test_esm2_models as t\n"
        "s = t.layouts.splits('2d', 4)\n"
        "place = pathlib.Path(sys.argv[1])\n"
        "steps, held = t.losses(place, s.mesh, s.layout, s.storage, s.residual, mm.Mesh(s.mesh))\n"
        "np.testing.assert_allclose(steps, eval(sys.argv[2]), rtol=1e-9)\n"
        "assert abs(held.loss / float(sys.argv[3]) - 1) < 1e-6\n"
    )
    written(tmp_path / "f.fasta", FAMILIES)
    wanted = [str(tmp_path), str([float(x) for x in one_rank[0]]), str(one_rank[1].loss)]
    done = launch(4, ["-c", code, *wanted], timeout_seconds=120, capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_feeds_are_blocks_of_one_batch(tmp_path):
    found = settings(written(tmp_path / "f.fasta", FAMILIES))
    task = ProteinTask(found, mm.SimulatedMesh("all:1"), lambda line: None)
    batches = task.batches()
    whole = batches.feeds(2, {"tokens": None, "targets": None})
    for rows, columns in (((0, 2), (0, 24)), ((2, 6), (5, 11)), ((6, 6), (0, 24))):
        block = batches.feeds(2, {"tokens": (rows, columns), "targets": (rows, columns)})
        for name, value in block.items():
            np.testing.assert_array_equal(value, whole[name][slice(*rows), slice(*columns)])
    assert (whole["tokens"] == MASK).any() and (whole["tokens"] < len(TOKENS)).all()
    assert ((whole["targets"] == PAD) | (whole["targets"] > EOS)).all()
    assert "sequences" in task.describe() and 0 < task.tokens_per_step <= 6 * 24


def test_it_learns_what_a_unigram_cannot_know(tmp_path):
    """Repeats of three letters: of a hidden one the others tell everything."""
    text = {f"s{k}": "".join(a * 3 for a in relatives("L" * 8, 1.0, k)) for k in range(60)}
    found = settings(
        written(tmp_path / "r.fasta", text),
        train={"steps": 150, "batch": 16},
        model={"dtype": "float32", "length": 26, "d_model": 32},
        evaluate={"batch": 16},
        optimizer={"learning_rate": "cosine(0.01, 10, 150, 0.001)"},
    )
    lines: list[str] = []
    result = train(found, tmp_path / "run", mesh=mm.SimulatedMesh("all:1"), say=lines.append, task=ProteinTask)
    measures = result.evaluation.measures
    assert measures["unigram_perplexity"] > 15
    assert measures["perplexity"] < 0.7 * measures["unigram_perplexity"]
    assert any("unigram_perplexity" in line for line in lines)


def test_the_config_is_an_esm2():
    from meshmpi.transformer.training.config import load

    found = load(Settings, CONFIG)
    values = dataclasses.asdict(found)["model"]
    assert {k: values[k] for k in models.OPTIONS} == models.OPTIONS
    config = ProteinTask.transformer(found, len(TOKENS))
    assert config.vocab == 33 and ProteinTask.vocabulary_size(found) == 33
    assert ProteinTask.parameter_count(config) == models.weight_count(config)


# ---- runs --------------------------------------------------------------------------------------


def test_a_run_is_scored_and_embedded(tmp_path, file, capsys):
    path = written(tmp_path / "f.fasta", FAMILIES)
    toml = tmp_path / "tiny.toml"
    toml.write_text(CONFIG.read_text())
    options = [
        "train.steps=2",
        f"data.corpus={path}",
        "data.held_out_fraction=0.3",
        "model.layers=1",
        "model.d_model=16",
        "model.d_ff=24",
        "model.heads=2",
        "model.d_kv=8",
        "model.length=40",
        "train.batch=4",
        "train.plot=false",
        "evaluate.windows=8",
    ]
    run = tmp_path / "run"
    sets = [part for o in options for part in ("--set", o)]
    assert main(["train", str(toml), "--out", str(run), "--layout", "2d", *sets]) == 0
    capsys.readouterr()
    common = [str(file), "--model", str(run), "--window", "30"]
    assert main(["score", *common, "--masked-share", "0.5", "--per-residue"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "name\tresidues\tlog_likelihood\tperplexity"
    rows = [line.split("\t") for line in lines[1:-1]]
    named = {r[0]: r for r in rows if r[0]}
    assert [int(named[n][1]) for n in SEQUENCES] == [len(s) for s in SEQUENCES.values()]
    assert sum(1 for r in rows if not r[0]) == int(named["all"][1]) == 114
    assert float(named["all"][2]) == pytest.approx(sum(float(named[n][2]) for n in SEQUENCES), abs=1e-3)
    assert "tokens/s" in lines[-1] and "of the time in collectives" in lines[-1]

    out = tmp_path / "new" / "v.npz"
    assert main(["embed", *common, "--out", str(out), "--per-residue"]) == 0
    with np.load(out) as saved:
        assert saved["names"].tolist() == list(SEQUENCES)
        assert saved["embeddings"].shape == (114, 16)
        assert np.diff(saved["starts"]).tolist() == [23, 5, 70, 16]
    assert main(["embed", *common, "--out", str(out)]) == 0
    with np.load(out) as saved:
        assert saved["embeddings"].shape == (4, 16) and np.isfinite(saved["embeddings"]).all()


def test_models_that_are_none(tmp_path, file, capsys):
    bad = tmp_path / "bad"
    bad.mkdir()
    with pytest.raises(CheckpointError, match="neither a config.json nor checkpoints"):
        open_model(bad)
    (bad / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json cannot be read"):
        open_model(bad)
    for text, message in (
        ("[]", "cannot be read: it is not a table"),
        ("{}", "type None"),
        ('{"model_type": "gpt2"}', "type 'gpt2'"),
    ):
        (bad / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            open_model(bad)
    (bad / "config.json").write_text(json.dumps({**HF, "vocab_size": 40}))
    with pytest.raises(CheckpointError, match="'vocab': 40.* but ESM2 has"):
        open_model(bad)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--masked-share", "2"], "--masked-share is 2.0"),
        (["--tokens", "0"], "--tokens is 0"),
        (["--window", "-1"], "--window is -1"),
        (["--layout", "2d", "--mesh", "all:1"], "layout '2d' on the mesh 'all:1'"),
        ([], "neither a config.json nor checkpoints"),
    ],
)
def test_mistakes_end_in_one_message(tmp_path, file, capsys, options, message):
    assert main(["score", str(file), "--model", str(tmp_path / "none"), *options]) == 1
    told = capsys.readouterr().err
    assert message in told and "Traceback" not in told
    assert main(["plan", "--ranks", "0"]) == 1
    assert "--ranks is 0" in capsys.readouterr().err


# ---- transformers --------------------------------------------------------------------------------

HF = {
    "model_type": "esm",
    "vocab_size": 33,
    "mask_token_id": 32,
    "pad_token_id": 1,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 90,
    "position_embedding_type": "rotary",
    "token_dropout": True,
    "layer_norm_eps": 1e-5,
    "emb_layer_norm_before": False,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random model that transformers makes and saves; no download."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    values = {k: v for k, v in HF.items() if k != "model_type"}
    model = transformers.EsmForMaskedLM(transformers.EsmConfig(**values)).eval()
    with torch.no_grad():
        for p in model.parameters():  # biases begin at 0, norms at 1: both would hide mistakes
            p.add_(0.05 * torch.randn_like(p))
    folder = tmp_path_factory.mktemp("esm")
    model.save_pretrained(folder)
    return folder, model


def their_scores(model) -> dict[str, np.ndarray]:
    """log p of each residue when it alone is hidden, a sequence at a time."""
    import torch

    found = {}
    for name, text in SEQUENCES.items():
        row = np.array([CLS, *numbers(text), EOS])
        rows = np.tile(row, (len(text), 1))
        at = np.arange(len(text))
        rows[at, at + 1] = MASK
        with torch.no_grad():
            logits = model(torch.from_numpy(rows).long(), torch.ones(rows.shape)).logits
        logs = torch.log_softmax(logits.double(), -1).numpy()
        found[name] = logs[at, at + 1, row[1:-1]]
    return found


@pytest.mark.parametrize(("name", "mesh"), [("replicated", "all:1"), ("megatron", "all:2"), ("2d", "rows:2;cols:2")])
def test_scores_are_those_of_transformers(checkpoint, name, mesh):
    folder, model = checkpoint
    ours = open_model(folder)
    assert ours.longest == 88
    records = [fasta.Record(n, text, 1) for n, text in SEQUENCES.items()]
    splits = layouts.splits(name, 0, mesh)
    run = Inference(ours.config, mm.SimulatedMesh(mesh), splits, residue_losses, ours.fill)
    parts = windows(records, ours.longest)
    for s in scoring.score(records, parts, run, 512, None, 2):
        want = their_scores(model)[s.name]
        np.testing.assert_allclose(s.residues, want, atol=2e-5 * np.abs(want).max())


def test_embeddings_are_those_of_transformers(checkpoint, tmp_path, file):
    import torch

    folder, model = checkpoint
    out = tmp_path / "v.npz"
    assert main(["embed", str(file), "--model", str(folder), "--out", str(out)]) == 0
    with np.load(out) as saved:
        for found, text in zip(saved["embeddings"], SEQUENCES.values(), strict=True):
            row = torch.tensor([[CLS, *numbers(text), EOS]]).long()
            with torch.no_grad():
                hidden = model.esm(row, torch.ones(row.shape)).last_hidden_state[0, 1:-1]
            want = hidden.double().mean(0).numpy()
            np.testing.assert_allclose(found, want, atol=2e-5 * np.abs(want).max())


@pytest.mark.matrix
@pytest.mark.parametrize(("ranks", "layout"), [(2, "megatron"), (4, "2d")])
def test_on_real_ranks(checkpoint, file, ranks, layout):
    folder, model = checkpoint
    done = launch(
        ranks,
        ["-m", "apps.esm2", "score", str(file), "--model", str(folder), "--layout", layout],
        timeout_seconds=120,
        capture_output=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    want = their_scores(model)
    for name, residues, total, _ in lines[1:5]:
        assert int(residues) == len(SEQUENCES[name])
        assert float(total) == pytest.approx(want[name].sum(), abs=2e-3)
    share = models.weight_count(open_model(folder).config) * 4 / ranks
    held = int(lines[-1][0].split("weights of a rank ")[1].split(" ")[0].replace(",", ""))
    assert share <= held < 1.35 * share  # one rank of two has two of three heads


def test_a_mistake_on_real_ranks_is_told_once(tmp_path, file):
    written(file, {"a": "MKV", "b": "MK"})
    file.write_text(file.read_text() + "J\n")
    done = launch(
        2,
        ["-m", "apps.esm2", "score", str(file), "--model", str(tmp_path)],
        timeout_seconds=120,
        capture_output=True,
        cwd=ROOT,
    )
    assert done.returncode != 0
    assert done.stderr.count("letter 'J' (column 1)") == 1, done.stderr
    assert f"{file}:5" in done.stderr and "Traceback" not in done.stderr


def test_the_command_starts_its_ranks(file, capfd, monkeypatch):
    asked = []
    monkeypatch.setattr("apps.esm2.__main__.on_ranks", lambda *a: asked.append(a) or 7)
    given = ["score", str(file), "--model", "x", "--ranks", "3"]
    assert main(given) == 7
    assert asked == [(3, given, "apps.esm2")]
