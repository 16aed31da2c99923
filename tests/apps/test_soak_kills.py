"""A few of the soak's kills and lost hosts; the soak itself makes a thousand."""

from __future__ import annotations

import argparse
import random

import pytest

from tests.soak import hosts, kills, trainer_kills
from tests.soak.namespaces import unavailable


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_jobs_leave_a_good_checkpoint_and_nothing_else(ranks: int):
    options = argparse.Namespace(kills=4, inside=2, ranks=ranks, quick=True, seed=ranks)
    rows = list(kills.run(options))
    assert [r.note for r in rows if r.failed] == []
    assert sum(r.tried for r in rows) >= 5


@pytest.mark.matrix
def test_killed_trainings_end_as_if_never_killed():
    options = argparse.Namespace(kills=2, ranks=2, quick=True, seed=3)
    rows = list(trainer_kills.run(options))
    assert [r.note for r in rows if r.failed] == []
    assert rows[0].tried == 2


@pytest.mark.matrix
def test_a_cut_link_ends_the_job_and_the_rest_goes_on():
    why = unavailable()
    if why:
        pytest.skip(f"hosts in namespaces: {why}")
    with hosts.Trial("h1:1,h2:1", 2, random.Random(0)) as trial:
        assert trial.lose(hosts.FAULTS["link cut"]) == ""
