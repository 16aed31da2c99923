"""The trials of `python -m tests.soak`, few of each: damage, failing writes, resharding."""

from __future__ import annotations

from argparse import Namespace

import pytest

from tests.soak import damage, reshard, writes


def good(rows):
    rows = list(rows)
    assert rows
    for row in rows:
        assert not row.failed, row


@pytest.mark.matrix
def test_damage():
    good(damage.run(Namespace(quick=True, seed=1, time=None)))


def test_reshard():
    good(reshard.run(Namespace(quick=True, seed=1)))


@pytest.mark.quick(1)
@pytest.mark.parametrize(("how", "fault"), [("at once", "ENOSPC"), ("background", "short")])
def test_writes(tmp_path, how, fault):
    found = writes.trials(tmp_path, how, fault)
    assert not any(found) and len(found) > 40  # so many calls does a save make


def test_writes_on_real_ranks():
    good([writes._on_ranks(1, "EIO", "background, partner")])


def test_full_disk():
    rows = list(writes.full_disk())
    if not rows:
        pytest.skip("mounting a file system needs root")
    good(rows)
