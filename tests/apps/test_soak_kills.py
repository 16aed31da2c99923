"""A few of the soak's kills and lost hosts; the soak itself makes a thousand."""

from __future__ import annotations

import argparse
import random

import pytest

from apps.soak import hosts, kills
from apps.soak.namespaces import unavailable
from meshmpi import checkpoint


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_cut_link_ends_the_job_and_the_rest_goes_on():
    why = unavailable()
    if why:
        pytest.skip(f"hosts in namespaces: {why}")
    with hosts.Trial("h1:1,h2:1", 2, random.Random(0)) as trial:
        assert trial.lose(hosts.FAULTS["link cut"]) == ""
