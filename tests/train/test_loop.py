"""The training loop: falling loss, exact resume, any layout, clear mistakes, signals, mpirun."""

from __future__ import annotations

import contextlib
import math
import os
import signal

import numpy as np
import pytest

import meshmpi as mm
from meshmpi import checkpoint, cli
from meshmpi.errors import CheckpointError, ConfigError, DataError, LayoutError, TrainingError
from meshmpi.launch.launch import launch
from meshmpi.training.callback import Callback
from meshmpi.training.metrics import MetricsWriter, read_metrics
from meshmpi.training.saves import Saves
from meshmpi.training.signals import StopSignals
from meshmpi.training.starting import set_aside
from meshmpi.transformer.text.characters import ByteVocabulary
from meshmpi.transformer.training.config import load
from meshmpi.transformer.training.corpora import FETCHERS
from meshmpi.transformer.training.evaluation import HeldOutText
from meshmpi.transformer.training.run import train
from meshmpi.transformer.training.settings import Settings
from meshmpi.transformer.training.trainer import Trainer
from tests.train.small import TEXT, losses, run_of
from tests.train.small import small as shortest

pytestmark = pytest.mark.usefixtures("cache")
MIXED = ["mesh.shape=rows:2;cols:2", "mesh.layout=batch:rows;heads:cols;d_ff:cols;vocab:cols"]


def small(tmp_path, *overrides):
    often = ("train.steps=8", "train.log_every=4", "evaluate.every=4")
    model = ("model.residual_dropout=0.1", "sample.tokens=5", "optimizer.learning_rate=0.01")
    return shortest(tmp_path, *often, *model, *overrides)


def settings(tmp_path, *overrides):
    return load(Settings, None, small(tmp_path, *overrides))


def run(tmp_path, name, *overrides, mesh="all:1", resume=False):
    return run_of(small(tmp_path, *overrides), tmp_path / name, mesh, resume)


def test_a_run_leaves_everything_behind(tmp_path):
    result, lines = run(tmp_path, "run", "train.steps=30", "train.plot=true")
    found = losses(tmp_path / "run")
    assert len(found) == 30 and found[-1] == result.loss < found[0] - 0.5
    records = read_metrics(tmp_path / "run")
    assert {"step", "loss", "learning_rate", "seconds", "comm_seconds"} <= records[0].keys()
    held_out = losses(tmp_path / "run", "held_out_loss")
    assert held_out[-1] == result.evaluation.loss < held_out[0]
    assert (tmp_path / "run" / "loss.png").stat().st_size > 1000
    assert [p.name for p in checkpoint.find(tmp_path / "run" / "checkpoints")] == ["step-00000030"]
    assert len(result.sample) == 5
    text = "\n".join(lines)
    for part in ("step 30/30", "tokens/s", "communicating", "left", "nats/token", "bits/byte"):
        assert part in text


def test_records_of_all_steps_are_in_the_file_when_a_save_begins(tmp_path, monkeypatch):
    """Also on ranks that write them once in a while: a job may be killed right after the save."""
    monkeypatch.setattr(
        "meshmpi.training.progress.MetricsWriter",
        lambda folder, rank, step, *_: MetricsWriter(folder, rank, step, 3600.0),
    )
    found, save = [], Saves.save

    def looking(saves, step, *more):
        found.append((step, [r["step"] for r in read_metrics(tmp_path / "run") if "loss" in r]))
        return save(saves, step, *more)

    monkeypatch.setattr(Saves, "save", looking)
    run(tmp_path, "run", "checkpoint.every=2")
    assert found == [(n, list(range(1, n + 1))) for n in (2, 4, 6, 8)]


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "momentum"])
def test_resume_is_as_if_never_stopped(tmp_path, optimizer):
    extra = [f"optimizer.name={optimizer}", "optimizer.learning_rate=0.01*linear_warmup(6)"]
    run(tmp_path, "whole", *extra)
    run(tmp_path, "parts", *extra, "train.steps=3")
    _, lines = run(tmp_path, "parts", *extra, resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert losses(tmp_path / "parts", "held_out_loss")[-1] == (losses(tmp_path / "whole", "held_out_loss")[-1])
    assert any("resumed from" in line and "step 3" in line for line in lines)


def test_resume_after_a_crash_rewrites_the_metrics(tmp_path):
    run(tmp_path, "whole")
    run(tmp_path, "parts", "checkpoint.every=2", "checkpoint.at_end=false", "train.steps=5")
    run(tmp_path, "parts", "checkpoint.every=2", resume=True)  # from step 4; step 5 is done again
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


@pytest.mark.parametrize(
    "layout",
    [
        ["mesh.shape=a:3"],
        ["mesh.shape=a:2", "mesh.layout=heads:a;d_ff:a;vocab:a"],
        ["mesh.shape=a:3", "mesh.layout=length:a"],
        MIXED,
        ["mesh.shape=a:2", "mesh.layout=batch:a", "mesh.storage=d_model:a"],
        ["mesh.shape=a:2", "mesh.layout=batch:a", "mesh.optimizer_storage=d_model:a"],
    ],
)
def test_every_layout_trains_alike_and_resumes_from_any(tmp_path, layout):
    layout = [*layout, "model.dtype=float64"]
    run(tmp_path, "one", "model.dtype=float64")
    run(tmp_path, "other", *layout)
    np.testing.assert_allclose(losses(tmp_path / "other"), losses(tmp_path / "one"), rtol=1e-5)
    run(tmp_path, "begun", "model.dtype=float64", "train.steps=4")
    run(tmp_path, "begun", *layout, resume=True)
    np.testing.assert_allclose(losses(tmp_path / "begun"), losses(tmp_path / "one"), rtol=1e-5)


def test_bfloat16_activations(tmp_path):
    result, _ = run(tmp_path, "run", "model.activation_dtype=bfloat16", "train.steps=30")
    assert result.loss < losses(tmp_path / "run")[0] - 0.3


def test_an_earlier_run_is_kept(tmp_path):
    run(tmp_path, "run", "train.steps=1")
    _, lines = run(tmp_path, "run", "train.steps=1")
    assert any("renamed the earlier run" in line for line in lines)
    assert checkpoint.find(tmp_path / "run.1" / "checkpoints")
    assert set_aside(tmp_path / "nothing") is None


def test_resume_finds_nothing_or_another_model(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        run(tmp_path, "run", resume=True)
    run(tmp_path, "run", "train.steps=1")
    with pytest.raises(CheckpointError, match="belongs to another model"):
        run(tmp_path, "run", "model.d_ff=16", resume=True)
    (tmp_path / "text.txt").write_text(TEXT[::-1])
    with pytest.raises(CheckpointError, match="trained on another text"):
        run(tmp_path, "run", resume=True)


def test_damaged_checkpoint_falls_back(tmp_path):
    run(tmp_path, "whole")
    run(tmp_path, "parts", "checkpoint.every=2", "train.steps=5")
    newest = checkpoint.find(tmp_path / "parts" / "checkpoints")[0]
    file = newest / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    _, lines = run(tmp_path, "parts", resume=True)
    assert any("shard rank-00000 of step 5 is damaged" in line for line in lines)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_another_checkpoint_can_be_named(tmp_path):
    run(tmp_path, "one", "checkpoint.every=4")
    source = tmp_path / "one" / "checkpoints" / "step-00000004"
    result, _ = run(tmp_path, "two", resume=source)
    assert losses(tmp_path / "two") == losses(tmp_path / "one")[4:]
    assert result.checkpoint.parent.parent.name == "two"


@pytest.mark.parametrize("background", ["false", "true"])
def test_going_back_keeps_what_is_written_then(tmp_path, background):
    """The checkpoints of the training that was given up do not push out those of the new one."""
    folder = tmp_path / "run" / "checkpoints"
    run(tmp_path, "run", "checkpoint.every=2", "checkpoint.keep=4")
    sets = ["checkpoint.every=1", "checkpoint.keep=2", f"checkpoint.background={background}"]
    result, lines = run(tmp_path, "run", "train.steps=5", *sets, resume=folder / "step-00000002")
    assert [p.name for p in checkpoint.find(folder)] == ["step-00000005", "step-00000004"]
    assert result.checkpoint == checkpoint.find(folder)[0]
    (line,) = [line for line in lines if "set aside in" in line]
    assert "step-00000004, step-00000006, step-00000008" in line
    (aside,) = folder.glob("abandoned-after-00000002-*")
    assert [p.name[-1] for p in checkpoint.find(aside)] == ["8", "6", "4"]
    _, lines = run(tmp_path, "run", "train.steps=6", *sets, resume=True)
    assert any("resumed from" in line and "step 5" in line for line in lines)
    assert not any("set aside in" in line for line in lines)


def test_one_that_is_kept_alone_goes_when_the_next_is_proven(tmp_path, monkeypatch):
    found, step = [], Trainer.one_step

    def looking(trainer):
        found.append([p.name[-1] for p in checkpoint.find(trainer.folder / "checkpoints")])
        return step(trainer)

    monkeypatch.setattr(Trainer, "one_step", looking)
    run(tmp_path, "run", "checkpoint.every=2", "checkpoint.keep=1", "train.steps=7")
    assert found == [[], [], ["2"], ["2"], ["4", "2"], ["4"], ["6", "4"]]
    assert [p.name[-1] for p in checkpoint.find(tmp_path / "run" / "checkpoints")] == ["7", "6"]


def test_training_that_diverges_stops(tmp_path):
    diverging = ["optimizer.name=sgd", "optimizer.learning_rate=1e30"]
    with pytest.raises(TrainingError, match=r"step \d+: loss or gradients are not finite"):
        run(tmp_path, "run", *diverging)
    with pytest.raises(TrainingError, match=r"the training loss of step \d+ is (nan|inf)"):
        run(tmp_path, "off", *diverging, "guard.non_finite=off")


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["model.d_modl=3"], ConfigError, "Did you mean 'd_model'"),
        (["optimizer.learning_rate=0.1*cosin(3)"], ConfigError, "Did you mean 'cosine'"),
        (["model.vocab=3"], ConfigError, r"'model.vocab' is 3, but the vocabulary has \d+"),
        (["mesh.layout=batch:alle", "mesh.shape=all:1"], LayoutError, "Did you mean 'all'"),
        (["data.corpus=nowhere.txt"], DataError, "the file does not exist"),
        (["data.vocabulary=byts"], DataError, "Did you mean 'bytes'"),
    ],
)
def test_mistakes_are_named(tmp_path, overrides, error, message):
    with pytest.raises(error, match=message):
        run(tmp_path, "run", *overrides)
    assert not (tmp_path / "run").exists()


def test_empty_corpus_and_fallback(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="is an empty file"):
        run(tmp_path, "run", f"data.corpus={tmp_path / 'empty.txt'}")


def test_a_fallback_is_for_named_corpora_that_cannot_be_fetched(tmp_path, monkeypatch):
    fallback = f"data.fallback={tmp_path / 'text.txt'}"
    with pytest.raises(DataError, match=r"'nowhere\.txt': the file does not exist"):
        run(tmp_path, "mistyped", "data.corpus=nowhere.txt", fallback)

    monkeypatch.setenv("MESHMPI_CACHE", str(tmp_path / "cache"))
    monkeypatch.delitem(FETCHERS, "shakespeare", raising=False)
    _, lines = run(tmp_path, "offline", "data.corpus=shakespeare", fallback)
    assert any("does not fetch it" in line and "instead" in line for line in lines)


# ---- evaluation ------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "batch", "length"), [(50, 4, 8), (49, 3, 16), (9, 2, 8), (2, 3, 4)])
def test_every_held_out_token_is_predicted_once(count, batch, length):
    tokens = np.arange(count)
    text = HeldOutText(tokens, batch, length)
    seen = []
    for index in range(text.batches):
        x, y, w = text.block(index)
        assert np.array_equal((x + 1)[w > 0], y[w > 0])
        seen += y[w > 0].tolist()
        for rows, columns in (((0, 1), (0, length)), ((1, batch), (1, 3)), ((0, 0), (0, length))):
            part = text.block(index, rows, columns)
            for a, b in zip(part, (x, y, w), strict=True):
                np.testing.assert_array_equal(a, b[slice(*rows), slice(*columns)])
    assert seen == list(range(1, count)) and text.predicted == count - 1
    assert text.text_bytes(ByteVocabulary()) == count - 1


def test_held_out_loss_is_the_same_in_any_batch_size(tmp_path):
    found = []
    for batch in (1, 7, 64):
        result, _ = run(tmp_path, f"run{batch}", f"evaluate.batch={batch}", "train.steps=2")
        found.append(result.evaluation.loss)
        assert result.evaluation.share == 1.0
    np.testing.assert_allclose(found, found[0], rtol=1e-6)


def test_held_out_loss_of_some_windows(tmp_path):
    result, _ = run(tmp_path, "run", "train.steps=0", "evaluate.final_windows=5")
    assert result.evaluation.tokens == 40 and 0 < result.evaluation.share < 1
    vocabulary = len(set(TEXT))
    assert abs(result.evaluation.loss - math.log(vocabulary)) < 1.5


def test_text_too_short_to_hold_out():
    with pytest.raises(DataError, match="none can be predicted"):
        HeldOutText(np.arange(1), 1, 1)


# ---- callbacks -------------------------------------------------------------------------------


class Seen(Callback):
    """Notes what it is told; fails after a step."""

    def __init__(self, fails_after=-1):
        self.found, self.fails_after = [], fails_after

    def on_begin(self, done, last):
        self.found.append(("begin", done))

    def on_step(self, step):
        self.found.append(("step", step.number))
        if step.number == self.fails_after:
            raise RuntimeError("by order")

    def on_evaluate(self, number, evaluation):
        self.found.append(("evaluate", number))

    def on_save(self, path, seconds):
        self.found.append(("save", int(path.name[-8:])))

    def on_end(self, stopped_by):
        self.found.append(("end", stopped_by))

    def on_failure(self, error):
        self.found.append(("failure", str(error)))


@pytest.mark.parametrize(
    ("fails_after", "told"),
    [
        (-1, "begin 0, step 1, step 2, evaluate 2, save 2, step 3, step 4, save 4, evaluate 4, end "),
        (3, "begin 0, step 1, step 2, evaluate 2, save 2, step 3, failure by order"),
    ],
)
def test_observers_are_told_what_happens(tmp_path, fails_after, told):
    seen = Seen(fails_after)
    made = settings(tmp_path, "train.steps=4", "evaluate.every=2", "checkpoint.every=2")
    with pytest.raises(RuntimeError) if fails_after > 0 else contextlib.nullcontext():
        train(made, tmp_path / "run", mesh=mm.SimulatedMesh("all:1"), say=lambda line: None, callbacks=[seen])
    assert ", ".join(f"{what} {value}" for what, value in seen.found) == told


# ---- signals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_run_after_the_step(tmp_path, number):
    run(tmp_path, "whole")
    trainer = Trainer(settings(tmp_path), mm.SimulatedMesh("all:1"), tmp_path / "run", [].append)
    one_step = trainer.one_step

    def stepping():
        if trainer.done == 2:
            os.kill(os.getpid(), number)
        return one_step()

    trainer.one_step = stepping
    result = trainer.run()
    assert (result.step, result.stopped_by) == (3, signal.Signals(number).name)
    assert result.checkpoint.name == "step-00000003" and result.sample == ""
    run(tmp_path, "run", resume=True)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_signals_act_as_before_afterwards():
    before = signal.getsignal(signal.SIGUSR1)
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGUSR1)
        assert signals.name == "SIGUSR1"
    assert signal.getsignal(signal.SIGUSR1) == before


# ---- the command line ------------------------------------------------------------------------


def command(tmp_path, *more, n=1, name="run"):
    config = tmp_path / "config.toml"
    config.write_text("[sample]\ntokens = 3\n")
    sets = [word for item in small(tmp_path) for word in ("--set", item)]
    return launch(
        n,
        ["-m", "meshmpi", "train", str(config), *sets, "--out", str(tmp_path / name), *more],
        timeout_seconds=240,
        capture_output=True,
    )


@pytest.mark.matrix
def test_under_mpirun_as_on_the_simulated_mesh(tmp_path):
    run(tmp_path, "simulated", *MIXED)
    done = command(tmp_path, "--mesh", "rows:2;cols:2", "--layout", MIXED[1].partition("=")[2], n=4)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 8/8") == 1  # rank 0 only
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(tmp_path / "simulated"), rtol=1e-5)
    again = command(tmp_path, "--mesh", "rows:2;cols:2", "--layout", MIXED[1].partition("=")[2], n=4, name="b")
    assert again.returncode == 0 and losses(tmp_path / "b") == losses(tmp_path / "run")


@pytest.mark.matrix
def test_checkpoint_of_three_ranks_goes_on_on_two(tmp_path):
    run(tmp_path, "whole")
    first = command(tmp_path, "--set", "train.steps=3", n=3)
    assert first.returncode == 0, first.stderr
    second = command(tmp_path, "--resume", n=2)
    assert second.returncode == 0, second.stderr
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(tmp_path / "whole"), rtol=1e-4)


@pytest.mark.matrix
def test_a_mistake_is_told_once_and_cleanly(tmp_path):
    done = command(tmp_path, "--set", "data.corpus=nowhere.txt", n=2)
    assert done.returncode == 1
    assert done.stderr.count("DataError: corpus 'nowhere.txt'") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.matrix
def test_a_bug_on_one_rank_ends_the_job_with_its_traceback(tmp_path):
    script = tmp_path / "bug.py"
    script.write_text(
        "import sys\n"
        "from meshmpi.transformer.training import trainer\n"
        "from meshmpi import cli\n"
        "step = trainer.Trainer.one_step\n"
        "def broken(self):\n"
        "    if self.mesh.rank == 1 and self.done == 3:\n"
        "        raise RuntimeError('a bug on rank 1')\n"
        "    return step(self)\n"
        "trainer.Trainer.one_step = broken\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    config = tmp_path / "config.toml"
    config.write_text("")
    sets = [word for item in small(tmp_path) for word in ("--set", item)]
    done = launch(
        2,
        [str(script), "train", str(config), *sets, "--out", str(tmp_path / "run")],
        timeout_seconds=120,
        capture_output=True,
        environment={"PYTHONPATH": os.getcwd()},
    )
    assert done.returncode not in (0, 124)
    assert done.stderr.count("RuntimeError: a bug on rank 1") == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1


def test_command_line_mistakes(tmp_path, capsys, monkeypatch):
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    config = tmp_path / "config.toml"
    config.write_text("[model]\nd_modl = 3\n")
    for words, message in (
        (["train", str(config)], "ConfigError: there is no key 'd_modl'"),
        (["train", str(tmp_path / "no.toml")], "does not exist"),
        (["sample", str(tmp_path)], "CheckpointError: there is no checkpoint in"),
        (["plan", str(config), "--set", "model"], "has no key and value"),
    ):
        assert cli.main(words) == 1
        err = capsys.readouterr().err
        assert message in err and "Traceback" not in err
    config.write_text("")
    assert cli.main(["train", str(config), "--mesh", "rows:4;cols:2", "--ranks", "6"]) == 1
    assert "needs 8 ranks" in capsys.readouterr().err


def test_every_setting_is_in_the_help(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help-settings"])
    text = capsys.readouterr().out
    for word in ("[model]", "d_model", "learning_rate", "16 windows", "2000 steps"):
        assert word in text
