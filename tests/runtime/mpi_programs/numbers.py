"""A training on real ranks in which numbers are spoilt on one rank; prints what the run says.

``python -m tests.runtime.mpi_programs.numbers FOLDER FAULT RANK [SETTING ...]``
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from meshmpi.errors import TrainingError
from meshmpi.transformer.training.config import load
from meshmpi.transformer.training.settings import Settings
from meshmpi.transformer.training.setup import make_mesh
from meshmpi.transformer.training.trainer import Trainer

VARIABLE = "decoder/final_norm/scale"  # never split: every rank has a replica


def spoil(trainer: Trainer, fault: str, here: bool) -> None:
    """Changes a variable, on one rank or (overflow) on all."""
    store, rank = trainer.step.variables, trainer.mesh.rank
    if fault == "overflow":
        store.blocks[VARIABLE][rank][...] = 1e38
    elif here and fault == "nan":
        store.blocks["decoder/embedding"][rank].reshape(-1)[1] = np.nan
    elif here and fault == "flip":
        store.blocks[VARIABLE][rank][3:4].view(np.uint32)[0] ^= 1 << 20
    elif here and fault == "slot":
        store.blocks[f"adamw/{VARIABLE}/v"][rank][2:3].view(np.uint32)[0] ^= 1 << 3


def main(folder: str, fault: str, rank: str, *overrides: str) -> None:
    settings = load(Settings, None, overrides)
    mesh = make_mesh(settings.mesh)
    trainer = Trainer(settings, mesh, Path(folder, "run"))
    steps = trainer.one_step

    def one_step() -> tuple[float, float]:
        if trainer.done == 3:
            spoil(trainer, fault, mesh.rank == int(rank))
        return steps()

    trainer.one_step = one_step
    try:
        result = trainer.run()
    except TrainingError as error:
        told = mesh.comm.allgather(str(error))
        assert len(set(told)) == 1, told
        if mesh.rank == 0:
            print(f"TrainingError: {error}")
    else:
        if mesh.rank == 0:
            print(f"ended at step {result.step}")


if __name__ == "__main__":
    main(*sys.argv[1:])
