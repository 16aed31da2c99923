"""Runs that save in the background, with buddies' copies: the same losses, the same states."""

from __future__ import annotations

import pytest

from meshmpi import checkpoint
from meshmpi.errors import CheckpointError
from tests.train import conftest
from tests.train.test_loop import command, losses, run

cache = conftest.cache  # the fixture: a text, and a cache of its own
pytestmark = pytest.mark.usefixtures("cache")

EVERY = ("checkpoint.every=2", "checkpoint.keep=0")
BEHIND = (*EVERY, "checkpoint.background=true")


def states(folder):
    return {p.name: checkpoint.read_manifest(p) for p in checkpoint.find(folder / "checkpoints")}


def test_in_the_background_as_at_once(tmp_path):
    run(tmp_path, "at once", *EVERY)
    run(tmp_path, "behind", *BEHIND)
    assert losses(tmp_path / "at once") == losses(tmp_path / "behind")
    a, b = states(tmp_path / "at once"), states(tmp_path / "behind")
    assert list(a) == list(b) and len(a) == 4
    from meshmpi.checkpoint.tools import differences

    for name in a:
        assert list(differences(a[name], b[name])) == []
        assert a[name].about["program_digest"] == b[name].about["program_digest"]


def test_the_copy_is_announced_and_the_end_waits(tmp_path):
    result, said = run(tmp_path, "run", *BEHIND)
    assert result.checkpoint == checkpoint.find(tmp_path / "run" / "checkpoints")[0]
    text = "\n".join(said)
    assert "checkpoints are written in the background, from a copy of" in text
    assert text.count("copied the state of step") == 3  # that of the end is written at once
    assert text.count("wrote ") == 4
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


def test_a_damaged_file_of_the_run_comes_back_from_the_partner(tmp_path):
    local = f"checkpoint.partner={tmp_path / 'local'}"
    run(tmp_path, "whole", local)
    run(tmp_path, "run", "train.steps=4", *BEHIND, local)
    newest = checkpoint.find(tmp_path / "run" / "checkpoints")[0]
    (newest / "rank-00000.safetensors").write_bytes(b"damaged")
    _, said = run(tmp_path, "run", *BEHIND, local, resume=True)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert any("was restored from" in line for line in said)
    assert any("step 4 is damaged (it has 7 bytes" in line for line in said)


def test_without_a_partner_the_one_before_is_taken(tmp_path):
    run(tmp_path, "whole")
    run(tmp_path, "run", "train.steps=4", *EVERY)
    newest = checkpoint.find(tmp_path / "run" / "checkpoints")[0]
    (newest / "rank-00000.safetensors").write_bytes(b"damaged")
    _, said = run(tmp_path, "run", resume=True)
    assert any("Resuming from the newest undamaged checkpoint" in line for line in said)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_another_mesh_is_noted(tmp_path):
    run(tmp_path, "run", "train.steps=4", "mesh.shape=rows:2", "mesh.layout=batch:rows")
    _, said = run(tmp_path, "run", resume=True)
    assert "note: another mesh than before: losses agree but for rounding" in said


def test_a_failing_write_ends_the_run_with_its_reason(tmp_path, monkeypatch):
    from meshmpi.files.disk import DurableFolder

    def full(self, name, pieces):
        raise OSError(28, "No space left on device", str(self.partial / name))

    monkeypatch.setattr(DurableFolder, "write", full)
    with pytest.raises(CheckpointError, match=r"rank 0 cannot write .*rank-00000.*errno 28"):
        run(tmp_path, "run", *BEHIND)


@pytest.mark.matrix
def test_under_mpirun(tmp_path):
    sets = [w for s in (*BEHIND, f"checkpoint.partner={tmp_path / 'local'}") for w in ("--set", s)]
    whole = command(tmp_path, n=2, name="whole")
    assert whole.returncode == 0, whole.stderr
    first = command(tmp_path, *sets, "--set", "train.steps=4", n=2)
    assert first.returncode == 0, first.stderr
    (checkpoint.find(tmp_path / "run" / "checkpoints")[0] / "rank-00000.safetensors").unlink()
    second = command(tmp_path, *sets, "--resume", n=2)
    assert second.returncode == 0, second.stderr
    assert "was restored from" in second.stdout
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
