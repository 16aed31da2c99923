"""How a rank tells the process that launched it that the training has ended as it should."""

from __future__ import annotations

import contextlib
import os

OUTCOME_VARIABLE = "MESHMPI_OUTCOME"
"""Names a file that ranks then make.  An exit status does not tell: mpirun of Open MPI 5.0.11 ends
with 0 when it has lost a host."""


def note_outcome() -> None:
    """Makes the file, where one is asked for."""
    path = os.environ.get(OUTCOME_VARIABLE)
    if path:
        with contextlib.suppress(FileExistsError):
            open(path, "x").close()
