"""The small text and the small model of the tests that train, and runs of them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import meshmpi as mm
from meshmpi.training.loop import Result
from meshmpi.training.metrics import read_metrics
from meshmpi.transformer.training.config import load
from meshmpi.transformer.training.run import train
from meshmpi.transformer.training.settings import Settings

TEXT = "".join(f"the {k % 7} quick brown foxes jump over {k % 5} lazy dogs\n" for k in range(120))
SMALL_MODEL = ("model.length=8", "model.d_model=16", "model.d_ff=32", "model.heads=2", "model.d_kv=8", "model.layers=1")


def small(folder: Path, *overrides: str) -> list[str]:
    """Settings of a short run on the text of the fixture `cache`."""
    short = ("train.steps=6", "train.batch=6", "train.plot=false")
    return [f"data.corpus={folder / 'text.txt'}", *SMALL_MODEL, *short, *overrides]


def run_of(
    overrides: Iterable[str], folder: Path, mesh: str = "all:1", resume: bool | str | os.PathLike[str] = False
) -> tuple[Result, list[str]]:
    """A run on a simulated mesh, and the lines that it printed."""
    lines: list[str] = []
    made = load(Settings, None, overrides)
    simulated = mm.SimulatedMesh(made.mesh.shape or mesh)
    return train(made, folder, mesh=simulated, resume=resume, say=lines.append), lines


def losses(folder: Path, key: str = "loss") -> list[float]:
    """What a run recorded under a name."""
    return [r[key] for r in read_metrics(folder) if key in r]
