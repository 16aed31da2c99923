"""A few of the soak's kills and lost hosts; the soak itself makes a thousand."""

from __future__ import annotations

import argparse
import random
import shutil

import pytest

from meshmpi import checkpoint
from meshmpi.transformer.training.metrics import MetricsWriter
from tests.soak import hosts, kills, survivors, trainer_kills
from tests.soak.namespaces import unavailable


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_jobs_leave_a_good_checkpoint_and_nothing_else(ranks: int):
    options = argparse.Namespace(kills=4, inside=2, ranks=ranks, quick=True, seed=ranks)
    rows = list(kills.run(options))
    assert [r.note for r in rows if r.failed] == []
    assert sum(r.tried for r in rows) >= 5


def test_the_soak_notices_what_it_looks_for():
    with kills.Chain(1, random.Random(0)) as chain:
        store, folder = chain.store, chain.folder / "checkpoints"
        store.assign(chain.expected.after(4))
        checkpoint.save(folder, store, 4, {})
        assert chain.look("").problem == ""
        (chain.folder / "commits").write_text("4\n6\n")
        assert chain.look("").problem == "step 6 was committed, the newest is 4"
        wrong = {n: v.copy() for n, v in chain.expected.after(6).items()}
        wrong["total"][3, 5] += 1
        store.assign(wrong)
        checkpoint.save(folder, store, 6, {})
        assert chain.look("").problem == "'total' of step 6 differs in 1 elements"
        store.assign(chain.expected.after(8))
        checkpoint.save(folder, store, 8, {})
        assert chain.look("").problem == ""
        (chain.shared / "sm_segment.left").touch()
        assert "1 left in" in chain.look("").problem
        (chain.shared / "sm_segment.left").unlink()
        next((folder / "step-00000008").glob("*.safetensors")).unlink()
        assert chain.look("").problem.startswith("unreadable: ")


@pytest.mark.matrix
def test_killed_trainings_end_as_if_never_killed():
    options = argparse.Namespace(kills=2, ranks=2, quick=True, seed=3)
    rows = list(trainer_kills.run(options))
    assert [r.note for r in rows if r.failed] == []
    assert rows[0].tried == 2


@pytest.mark.matrix
def test_the_soak_of_the_trainer_notices_what_it_looks_for():
    with trainer_kills.Trainings(1, random.Random(0)) as trainings:
        assert trainings.train_without_kills() == ""
        run, whole = trainings.folder / "run", trainings.folder / "whole"
        folder = run / "checkpoints"
        shutil.copytree(whole, run)
        last = sorted(folder.iterdir())[-1]
        assert trainings.look("").problem.startswith("50 checkpoints, and unfinished:")
        for path in sorted(folder.iterdir())[: -trainer_kills.KEEP]:
            shutil.rmtree(path)
        assert trainings.look("").problem == trainings.differs() == ""
        for k in range(2):
            (folder / f".step-00000204-{k}.partial").mkdir()
        assert trainings.look("").problem.startswith("6 checkpoints, and unfinished: .step-")
        for k in range(2):
            (folder / f".step-00000204-{k}.partial").rmdir()

        metrics = run / "metrics-rank-00000.jsonl"
        lines = metrics.read_text().splitlines(keepends=True)
        metrics.write_text("".join([*lines[:3], *lines[2:]]))
        assert trainings.differs() == "rank 0 has 201 records of 200 steps"
        metrics.write_text("".join([*lines[:3], *lines[4:]]))
        assert trainings.differs().startswith("records differ")
        metrics.write_text("".join(lines))
        (run / "metrics-rank-00000.new").touch()
        assert trainings.differs().startswith("names differ")
        (run / "metrics-rank-00000.new").unlink()

        shutil.rmtree(last)
        assert trainings.look("").problem == "step 200 was told of, the newest is 196"
        shutil.copytree(whole / "checkpoints" / "step-00000192", last)
        assert trainings.look("").problem.startswith("unreadable: ")


SAID = "rank {} (host a, pid 1) {} lost after step {}: 3 ranks go on with mesh {{all: 3}} from step"


def test_the_soak_of_survivors_notices_what_it_looks_for():
    with survivors.Survivals(survivors.KINDS[1], random.Random(0)) as runs:

        def wrong(said: str, losses: list[float], status: int = 0) -> str:
            (runs.folder / "output").write_text(said)
            shutil.rmtree(runs.folder / "run", ignore_errors=True)
            for name, values in (("whole", [4.0, 3.0, 2.0]), ("run", losses)):
                with MetricsWriter(runs.folder / name, resume_step=0) as metrics:
                    for step, loss in enumerate(values, 1):
                        metrics.write(step=step, loss=loss)
            return runs._wrong("run", status)

        memory = SAID.format(1, "was", 2) + " 2, which is in memory; 0 steps to repeat"
        older, both = (SAID.format(1, verb, 2) + " 1; 1 step to repeat" for verb in ("was", "were"))
        assert wrong(memory, [4.0, 3.0, 2.0001]) == wrong(both, [4.0, 3.0001, 2.0]) == ""
        assert (runs.losses, runs.kept) == (2, 1)
        assert wrong(memory, [4.0, 3.0, 2.0], 69).startswith("exit status 69")
        assert wrong("", [4.0, 3.0, 2.0]) == "a rank was killed and nobody has said so"
        assert wrong(memory, [4.0, 3.0]) == "2 of 3 steps are recorded"
        assert wrong(memory, [4.0, 3.0001, 2.0]).startswith("step 2, of the whole mesh")
        assert wrong(memory, [4.0, 3.0, 2.1]) == "step 3: loss 2.1 for 2.0"
        assert wrong(older, [4.0, 3.0, 2.0]).startswith("1 steps were repeated though")


@pytest.mark.matrix
def test_a_cut_link_ends_the_job_and_the_rest_goes_on():
    why = unavailable()
    if why:
        pytest.skip(f"hosts in namespaces: {why}")
    with hosts.Trial("h1:1,h2:1", 2, random.Random(0)) as trial:
        assert trial.lose(hosts.FAULTS["link cut"]) == ""
