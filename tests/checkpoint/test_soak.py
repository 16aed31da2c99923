"""The trials of `python -m tests.soak`, few of each: damage, failing writes, resharding."""

from __future__ import annotations

from argparse import Namespace

import pytest

from tests.soak import damage, reshard, trusted, writes


def good(rows):
    rows = list(rows)
    assert rows
    for row in rows:
        assert not row.failed, row


def test_damage():
    good(damage.run(Namespace(quick=True, seed=1, time=None)))


def test_reshard():
    good(reshard.run(Namespace(quick=True, seed=1)))


@pytest.mark.quick(1)
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


@pytest.mark.parametrize(
    ("kind", "where", "believing"),
    [
        (
            "kernel libraries and their index",
            "meshmpi.kernels.native.compiler._kept",
            lambda folder, key: folder.read(f"{key}.so"),
        ),
        (
            "measured machines",
            "meshmpi.files.cache.read_sealed",
            lambda folder, name: (folder.read(name) or b"").rpartition(b"#")[0],
        ),
        ("buddies' copies", "meshmpi.checkpoint.buddies.is_whole", lambda data, record: True),
        ("how ranks ended", "meshmpi.guard.outcome._content", lambda path, text: f"{text} # -\n".encode()),
    ],
)
def test_the_trials_notice_files_that_are_believed(tmp_path, monkeypatch, kind, where, believing):
    monkeypatch.setattr(trusted, "KINDS", {kind: trusted.KINDS[kind]})
    monkeypatch.setattr(where, believing)
    rows = list(trusted.rows(tmp_path, 20, 3))
    assert all(row.failed for row in rows)


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
