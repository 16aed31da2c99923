"""Fixtures of the tests of commands."""

from __future__ import annotations

import pytest

import meshmpi as mm


@pytest.fixture
def simulated(monkeypatch, tmp_path):
    """Commands run on two simulated ranks, and keep their caches here."""
    monkeypatch.setenv("MESHMPI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("meshmpi.transformer.training.setup.make_mesh", lambda s: mm.SimulatedMesh(s.shape or "all:2"))
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def simulated_training(monkeypatch):
    monkeypatch.setattr("meshmpi.transformer.training.run.make_mesh", lambda s: mm.SimulatedMesh(s.shape or "all:2"))
