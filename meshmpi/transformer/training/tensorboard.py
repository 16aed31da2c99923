"""Numbers of a run as event files for TensorBoard; written by the package tensorboardX."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshmpi.errors import ConfigError

FOLDER = "tensorboard"
"""Inside of the folder of a run."""
NAMES = {
    "loss": "loss/training",
    "held_out_loss": "loss/held_out",
    "bits_per_byte": "loss/bits_per_byte",
    "seconds": "step/seconds",
    "comm_seconds": "step/communication_seconds",
    "compute_seconds": "step/compute_seconds",
}
"""Name in the metrics -> tag; others are ``run/<name>``."""


def check_available() -> None:
    """Raises ConfigError where the package is not installed."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise ConfigError(
            "train.tensorboard needs the package tensorboardX, which is not installed.",
            "Install it with: pip install 'meshmpi[tensorboard]', or leave train.tensorboard out.",
        )


class EventWriter:
    """Appends the records of the metrics to the event files of a run.

    Args:
        folder: Folder of the run; files go to its folder `FOLDER`.
        first_step: Events of this step and later that an earlier part of the run wrote are hidden
            by TensorBoard, as they come again.

    Raises:
        ConfigError: The package tensorboardX is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str], first_step: int) -> None:
        check_available()
        from tensorboardX import SummaryWriter

        purge = first_step if first_step > 1 else None
        # A file's name tells the second: parts of a run that begin in the same one need another.
        self._writer: Any = SummaryWriter(
            str(Path(folder, FOLDER)), purge_step=purge, filename_suffix=f".from-{first_step}"
        )

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes the numbers of a record, and nothing else of it."""
        for name, value in values.items():
            if name != "step" and isinstance(value, (int, float)):
                tag = NAMES.get(name, f"run/{name}")
                if name == "seconds" and "held_out_loss" in values:
                    tag = "evaluation/seconds"
                self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        """Writes what is still buffered."""
        self._writer.close()
