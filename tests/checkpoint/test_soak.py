"""The trials of `python -m apps.soak`, few of each: damage, failing writes, resharding."""

from __future__ import annotations

from argparse import Namespace

import pytest

from apps.soak import damage, reshard, writes


def good(rows):
    rows = list(rows)
    assert rows
    for row in rows:
        assert not row.failed, row


def test_damage():
    good(damage.run(Namespace(quick=True, seed=1, time=None)))


def test_reshard():
    good(reshard.run(Namespace(quick=True, seed=1)))


@pytest.mark.parametrize(("how", "fault"), [("at once", "ENOSPC"), ("background", "short")])
def test_writes(tmp_path, how, fault):
    tried, failures = writes.trials(tmp_path, how, fault)
    assert not failures and tried > 40  # so many calls does a save make


def test_writes_on_real_ranks():
    good([writes._on_ranks(1, "EIO", "background, partner")])


def test_full_disk():
    rows = list(writes.full_disk())
    if not rows:
        pytest.skip("mounting a file system needs root")
    good(rows)


def test_the_trials_notice_a_load_that_does_not_verify(monkeypatch):
    from meshmpi.checkpoint import shard

    real = shard.hashing.hashes

    monkeypatch.setattr(shard, "header_hash", lambda header: "0" * 16)
    monkeypatch.setattr(shard.hashing, "hashes", lambda data: 0 * real(data))
    flips = next(iter(damage.run(Namespace(quick=True, seed=1, time=None))))
    assert flips.failed and flips.passed < flips.tried / 2


def test_the_trials_notice_a_save_that_hides_its_errors(tmp_path, monkeypatch):
    from meshmpi.checkpoint import disk

    def hiding(path, pieces):
        try:
            real(path, pieces)
        except OSError:
            path.touch()

    real = disk.write_file
    monkeypatch.setattr(disk, "write_file", hiding)
    _, failures = writes.trials(tmp_path, "at once", "EIO")
    assert failures
