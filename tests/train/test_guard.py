"""Numbers that are not finite: nothing is updated, the place is named, the run stops or goes on."""

from __future__ import annotations

import math

import numpy as np
import pytest

import meshmpi as mm
from meshmpi import checkpoint
from meshmpi.errors import TrainingError
from meshmpi.launch.launch import TIMED_OUT, launch
from meshmpi.nn import optimize
from meshmpi.training.metrics import read_metrics
from meshmpi.transformer.training.config import load
from meshmpi.transformer.training.settings import Settings
from meshmpi.transformer.training.trainer import Trainer
from tests.train.small import TEXT
from tests.train.small import small as shortest

pytestmark = pytest.mark.usefixtures("cache")

OPTIMIZERS = {
    "sgd": lambda storage: optimize.SGD(0.1),
    "momentum": lambda storage: optimize.Momentum(0.1, storage=storage),
    "adam": lambda storage: optimize.AdamW(0.1, storage=storage, clip_norm=1.0),
    "adafactor": lambda storage: optimize.Adafactor(min_dim_size_to_factor=2, beta1=0.9, storage=storage),
    "lamb": lambda storage: optimize.LAMB(0.1, storage=storage),
}
LAYOUTS = [
    ("a:1", "", None, None),
    ("a:2", "batch:a", None, "io:a"),
    ("a:2", "hidden:a", None, None),
    ("a:2", "batch:a", "io:a", None),
    ("a:2;b:3", "batch:a;hidden:b", None, None),
    ("a:2", "", None, None),
]


def small(tmp_path, *overrides):
    (tmp_path / "text.txt").write_text(TEXT)
    more = ("evaluate.every=0", "sample.tokens=0", "checkpoint.every=2", "guard.replica_every=2")
    return shortest(tmp_path, *more, *overrides)


# ---- the update is left out, exactly ---------------------------------------------------------


def compiled(make, mesh, layout, storage, parts, watched=True):
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:6;io:4")

        def model(features):
            h = mm.relu(mm.dense(features["x"], mm.Dimension("hidden", 6), name="first"))
            return {"loss": mm.reduce_mean(mm.square(mm.dense(h, mm.Dimension("out", 3))))}

        found, pairs = optimize.serialize_training_step({"x": x}, model, "batch", parts)
        optimizer = make()
        updates = optimizer.apply_gradients(pairs, [found["loss"]] if watched else None)
    fetches = {"loss": found["loss"]} | ({"finite": optimizer.finite} if watched else {})
    return mm.compile(graph, mm.SimulatedMesh(mesh), layout, fetches=fetches, updates=updates, storage=storage)


def state(step):
    return {(name, rank): b.tobytes() for name, blocks in step.variables.blocks.items() for rank, b in blocks.items()}


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("mesh", "layout", "storage", "slots"), LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_is_not_finite_changes_no_bit(name, mesh, layout, storage, slots, parts):
    def make():
        return OPTIMIZERS[name](slots)

    step = compiled(make, mesh, layout, storage, parts)
    plain = compiled(make, mesh, layout, storage, parts, watched=False)
    data = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    for _ in range(2):
        assert step(x=data)["finite"]
        plain(x=data)
    before = state(step)
    assert before == state(plain)  # the guard costs no bit of a healthy run
    for wrong in (np.nan, np.inf, -np.inf, 1e30):  # the last overflows in the square
        spoilt = data.copy()
        spoilt[4, 1] = wrong
        assert not step(x=spoilt)["finite"]
        assert state(step) == before
    assert step(x=data)["finite"]
    plain(x=data)
    assert state(step) == state(plain) != before


def test_a_learning_rate_that_is_not_finite_is_no_update():
    def schedule(done):
        return mm.divide(1.0, mm.subtract(mm.cast(done, "float32"), 1.0))  # inf at the second step

    step = compiled(lambda: optimize.SGD(schedule), "a:2", "batch:a", None, 1)
    data = np.ones((6, 4), np.float32)
    assert step(x=data)["finite"]
    before = state(step)
    assert not step(x=data)["finite"]
    assert state(step) == before


def test_updates_registered_with_the_graph_are_the_guarded_ones():
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:6;io:4")
        loss = mm.reduce_mean(mm.square(mm.dense(x, mm.Dimension("out", 3))))
        optimizer = optimize.AdamW(0.1)
        updates = optimizer.minimize(loss, watch=[loss])
    assert graph.updates == updates and optimizer.finite.dtype == "bool"
    assert len({u.variable.name for u in updates}) == len(updates)


# ---- what the trainer makes of it ------------------------------------------------------------


def trainer(tmp_path, mesh, spoils, *overrides):
    """A run whose variables ``spoils(trainer, step)`` may change before each step."""
    lines = []
    settings = load(Settings, None, small(tmp_path, *overrides))
    made = Trainer(settings, mm.SimulatedMesh(mesh), tmp_path / "run", lines.append)
    one_step = made.one_step

    def stepping():
        spoils(made, made.done)
        return one_step()

    made.one_step = stepping
    return made, lines


def overflow_at(*steps):
    kept = {}

    def spoils(made, done):
        store = made.step.variables
        blocks = store.blocks["decoder/final_norm/scale"]
        if done in steps and not kept:
            kept.update({r: b.copy() for r, b in blocks.items()})
            for b in blocks.values():
                b[...] = 1e38
        elif done not in steps and kept:
            for r, b in blocks.items():
                b[...] = kept[r]
            kept.clear()

    return spoils


@pytest.mark.parametrize(
    "layout",
    [
        ["mesh.shape=a:1"],
        ["mesh.shape=a:2", "mesh.layout=batch:a"],
        ["mesh.shape=a:2;b:2", "mesh.layout=batch:a;heads:b;d_ff:b;vocab:b"],
    ],
)
def test_stop_names_the_place_and_keeps_variables_and_checkpoints(tmp_path, layout):
    shape = layout[0].removeprefix("mesh.shape=")
    made, _ = trainer(tmp_path, shape, overflow_at(5), *layout, "train.steps=8")
    with pytest.raises(TrainingError) as caught:
        made.run()
    text = str(caught.value)
    assert "step 6: loss or gradients are not finite" in text and "among" in text
    assert "language_model.py:" in text and "It began here: '" in text
    assert [p.name for p in checkpoint.find(tmp_path / "run" / "checkpoints")] == ["step-00000004", "step-00000002"]
    for blocks in made.step.variables.blocks.values():
        assert all(np.isfinite(b.astype(np.float64)).all() for b in blocks.values())


def test_skip_goes_on_as_if_the_step_had_no_update(tmp_path):
    made, lines = trainer(tmp_path, "all:2", overflow_at(2, 3), "guard.non_finite=skip", "checkpoint.every=0")
    result = made.run()
    assert result.step == 6 and math.isfinite(result.loss)
    told = [line for line in lines if "is skipped" in line]
    assert len(told) == 2 and "step 3" in told[0] and "It began here" in told[0]
    assert "2 in a row" in told[1] and "It began here" not in told[1]
    records = [r for r in read_metrics(tmp_path / "run") if "loss" in r]
    assert [bool(r.get("skipped")) for r in records] == [False, False, True, True, False, False]
    assert made.step.variables["adamw/step"] == 4


def test_poisoned_checkpoints_do_not_push_out_the_last_good_one(tmp_path):
    """The update of step 3 is finite and wrecks the model: no later step is finite."""

    def wrecks(made, done):
        if done == 3:
            for b in made.step.variables.blocks["decoder/final_norm/scale"].values():
                b[...] = 1e38

    for keep, policy in ((2, "skip"), (1, "skip"), (1, "stop")):
        folder = tmp_path / f"{policy}-{keep}"
        folder.mkdir()
        made, lines = trainer(
            folder,
            "all:1",
            wrecks,
            f"guard.non_finite={policy}",
            "guard.max_skips=3",
            "checkpoint.every=1",
            f"checkpoint.keep={keep}",
            "train.steps=9",
        )
        with pytest.raises(TrainingError, match="Continue with --resume.*older checkpoint"):
            made.run()
        names = [p.name[-1] for p in checkpoint.find(folder / "run" / "checkpoints")]
        assert names == ["3", "2"], (keep, policy, lines)


def test_the_end_is_saved_while_steps_are_skipped_and_nothing_goes(tmp_path):
    made, _ = trainer(
        tmp_path, "all:1", overflow_at(4, 5), "guard.non_finite=skip", "checkpoint.every=1", "checkpoint.keep=2"
    )
    assert made.run().checkpoint.name == "step-00000006"
    names = [p.name[-1] for p in checkpoint.find(tmp_path / "run" / "checkpoints")]
    assert names == ["6", "4", "3"]


def test_too_many_skips_stop(tmp_path):
    made, _ = trainer(
        tmp_path, "all:1", overflow_at(*range(1, 9)), "guard.non_finite=skip", "guard.max_skips=3", "checkpoint.every=0"
    )
    with pytest.raises(TrainingError, match="step 4: .*3 steps in a row were skipped"):
        made.run()


def test_variables_that_are_not_finite_are_not_saved(tmp_path):
    def spoils(made, done):
        if done == 3:  # a slot: the update itself makes the variable NaN
            for b in made.step.variables.blocks["adamw/decoder/final_norm/scale/m"].values():
                b[2] = np.nan

    made, _ = trainer(tmp_path, "all:2", spoils)
    with pytest.raises(TrainingError, match=r"holds nan at \[d_model=2\] on rank 0: no checkpoint"):
        made.run()
    names = [p.name for p in checkpoint.find(tmp_path / "run" / "checkpoints")]
    assert names == ["step-00000002"]


def test_a_replica_that_differs_stops_and_majority_repairs(tmp_path):
    def spoils(made, done):
        if done == 3:
            made.step.variables.blocks["decoder/final_norm/scale"][1][3:4].view(np.uint32)[0] ^= 64

    made, _ = trainer(tmp_path, "all:3", spoils)
    with pytest.raises(TrainingError, match="after step 4 .*Damaged: the copy of rank 1"):
        made.run()
    assert made.at.checkpoint.name == "step-00000002"
    made, lines = trainer(tmp_path, "all:3", spoils, "guard.replicas=repair")
    assert made.run().step == 6
    assert sum("were repaired" in line for line in lines) == 1


# ---- real ranks ------------------------------------------------------------------------------


def on_ranks(tmp_path, ranks, fault, rank, *overrides):
    done = launch(
        ranks,
        ["-m", "tests.runtime.mpi_programs.numbers", tmp_path, fault, str(rank), *small(tmp_path, *overrides)],
        timeout_seconds=60,
        capture_output=True,
        environment={"MESHMPI_CACHE": str(tmp_path / "cache")},
    )
    assert done.returncode != TIMED_OUT, done.stderr
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


HEADS = ["mesh.layout=heads:all;d_ff:all;vocab:all", "mesh.shape=all:2"]


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("ranks", "fault", "rank", "overrides", "parts"),
    [
        (1, "overflow", 0, [], ["step 4: loss or grad", "language_model.py", "on rank 0"]),
        (2, "overflow", 0, HEADS, ["step 4: loss or grad", "language_model.py", "on rank 0"]),
        (2, "nan", 1, [], ["variable 'decoder/embedding'", "on rank 1, first at [vocab=0, d_model=1]"]),
        (2, "nan", 1, ["mesh.shape=all:2", "mesh.layout="], ["This happened only on ranks 1", "on rank 1"]),
        (2, "flip", 1, [], ["after step 4", "ranks 0, 1 hold", "[d_model=3]", "final_norm/scale"]),
        (4, "flip", 2, [], ["after step 4", "Damaged: the copy of rank 2 (host "]),
        (
            4,
            "slot",
            3,
            ["mesh.shape=a:2;b:2", "mesh.layout=batch:a;heads:b;d_ff:b;vocab:b"],
            ["'adamw/decoder/final_norm/scale/v'", "Damaged: the copy of rank 3 (host "],
        ),
        (4, "flip", 1, ["guard.replicas=repair"], ["replicas differed and were repaired", "ended at step 6"]),
        (3, "none", 0, ["guard.replica_every=1"], ["ended at step 6"]),
    ],
)
def test_ranks_agree_and_name_the_rank(tmp_path, ranks, fault, rank, overrides, parts):
    told = on_ranks(tmp_path, ranks, fault, rank, *overrides)
    for part in parts:
        assert part in told, told
