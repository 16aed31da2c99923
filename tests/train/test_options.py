"""Options of the trainer: microbatches, LAMB, split slots of Adafactor, experts with reports."""

from __future__ import annotations

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.errors import ConfigError, ShapeError
from meshmpi.transformer.tasks.registry import build_training_graph
from meshmpi.transformer.training.config import load
from meshmpi.transformer.training.settings import Settings, transformer_config
from tests.train.small import losses
from tests.train.test_loop import run, settings

pytestmark = pytest.mark.usefixtures("cache")

PLAIN = ["model.residual_dropout=0.0", "sample.tokens=0", "evaluate.final_windows=4"]
EXPERTS = ["model.experts=4", "model.experts_every=1", "model.expert_z_loss=0.001"]


@pytest.mark.parametrize("layout", ["", "batch:all"])
def test_microbatches_are_one_batch(tmp_path, layout):
    found = []
    for parts, mesh in ((1, ""), (3, layout)):
        name = f"run{parts}"
        wanted = [*PLAIN, f"optimizer.microbatches={parts}", f"mesh.layout={mesh}"]
        run(tmp_path, name, *wanted, mesh="all:2" if mesh else "all:1")
        found.append(losses(tmp_path / name))
    # float32 sums in another order, over 8 steps
    np.testing.assert_allclose(found[1], found[0], rtol=2e-4)
    assert len(found[0]) == 8


def test_microbatches_that_do_not_divide(tmp_path):
    with pytest.raises(ShapeError, match=r"'batch' \(6\) cannot be cut into 4"):
        run(tmp_path, "run", "optimizer.microbatches=4")
    with pytest.raises(ConfigError, match="at least 1"):
        settings(tmp_path, "optimizer.microbatches=0")


def test_microbatches_take_less_memory(tmp_path):
    peaks = []
    for parts in (1, 8):
        made = settings(tmp_path, "train.batch=64", f"optimizer.microbatches={parts}")
        built = build_training_graph(made, transformer_config(made.model, 40))
        plan = mm.plan(built.graph, "all:1", "", fetches=[built.loss], updates=built.updates)
        peaks.append(plan.cost.peak_memory)
    assert peaks[1] < peaks[0] / 2


def test_experts_learn_and_report(tmp_path):
    wanted = [*PLAIN, *EXPERTS, "train.steps=30", "optimizer.name=lamb"]
    result, lines = run(tmp_path, "run", *wanted)
    found = losses(tmp_path / "run")
    assert found[-1] < found[0] - 0.5 and result.evaluation.loss < found[0]
    balance, dropped = (losses(tmp_path / "run", f"expert_{n}") for n in ("balance", "dropped"))
    assert len(balance) == len(dropped) == 30
    assert min(balance) > 0.9 and max(balance) < 4 and min(dropped) >= 0 and max(dropped) < 1
    assert "expert_balance 1." in "\n".join(lines)


def test_experts_in_layouts(tmp_path):
    found = []
    for number, where in enumerate(["", "batch:rows;experts:rows", "experts:cols;d_ff:rows"]):
        places = ["mesh.shape=rows:2;cols:2", f"mesh.layout={where}"] if where else []
        more = ["optimizer.microbatches=2"] if where.startswith("batch") else []
        run(tmp_path, f"run{number}", *PLAIN, *EXPERTS, *places, *more, "train.steps=5")
        found.append(losses(tmp_path / f"run{number}"))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=2e-4)


def test_adafactor_with_split_slots(tmp_path):
    wanted = ["optimizer.name=adafactor", "mesh.optimizer_storage=d_model?:rows"]
    made = settings(tmp_path, *wanted, "model.d_model=128", "model.d_ff=128")
    built = build_training_graph(made, transformer_config(made.model, 40))
    program = mm.plan(built.graph, "rows:2", "batch:rows", fetches=[built.loss], updates=built.updates).program
    types = {n: str(v.type) for n, v in program.variables.items()}
    (slot,) = [n for n in types if n.endswith("wi/kernel/col")]
    assert "d_model=128/rows" in types[slot]
    assert program.values()["reduce_scatter"]["rows"] > 0


def test_switch_recipe_describes_its_layout():
    path = "apps/transformer/configs/switch.toml"
    made = load(Settings, path, ["model.d_model=32", "model.d_ff=64"])
    built = build_training_graph(made, transformer_config(made.model, 65))
    layout = "batch:all;experts:all"
    program = mm.plan(built.graph, "all:2", layout, fetches=[built.loss], updates=[]).program
    assert program.counts()["all_to_all"] == 2 * 2
