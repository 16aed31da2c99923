"""Trains a small network by `mm.fit` on all ranks: ``fitting FOLDER STEPS [die_at]``; rank 1 is killed at that step."""

from __future__ import annotations

import os
import signal
import sys

import meshmpi as mm
from tests.training.small import Rows, network

if __name__ == "__main__":
    folder, steps, dies = sys.argv[1], int(sys.argv[2]), int([*sys.argv, "0"][3])

    class Dies(mm.Callback):
        def on_step(self, step) -> None:
            if step.number == dies and self.run.mesh.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    mesh = mm.Mesh(f"all:{os.environ['RANKS']}")
    step, finite = network(mesh)
    result = mm.fit(
        step, Rows(), steps=steps, folder=folder, finite=finite, resume="auto", checkpoint=4, callbacks=[Dies()]
    )
    sys.exit(result.exit_status)
