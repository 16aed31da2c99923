"""Opens a finished or stopped run: its settings, its vocabulary, its model on any mesh."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshmpi import checkpoint
from meshmpi.checkpoint.tools import checkpoints_of
from meshmpi.errors import CheckpointError
from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.training.callback import Evaluation, Sample
from meshmpi.transformer.models import TransformerConfig
from meshmpi.transformer.tasks.base import Evaluator
from meshmpi.transformer.tasks.registry import task_class
from meshmpi.transformer.text.base import Vocabulary
from meshmpi.transformer.text.vocabulary import restore_vocabulary
from meshmpi.transformer.training.config import from_dict
from meshmpi.transformer.training.settings import Settings


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint with the settings of its run and the vocabulary of its tokens."""

    manifest: checkpoint.Manifest
    settings: Settings
    vocabulary: Vocabulary

    @property
    def config(self) -> TransformerConfig:
        """The Transformer of the run."""
        return task_class(self.settings.task).transformer(self.settings, self.vocabulary.size)


def open_run(run: str | os.PathLike[str]) -> SavedRun:
    """Reads the manifest of a checkpoint, or of the newest one of a run.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    manifest = checkpoint.read_manifest(checkpoints_of(Path(run))[0])
    settings = from_dict(Settings, manifest.about["settings"])
    return SavedRun(manifest, settings, restore_vocabulary(manifest.about["vocabulary"]))


def evaluate_run(
    saved: SavedRun, settings: Settings, mesh: AnyMesh, layout: str, say: Callable[[str], None]
) -> tuple[Evaluation, Sample]:
    """The held-out loss of a trained model, and the sample that its task shows.  Collective.

    Settings may have changed (as the number of sentences for BLEU), and so may mesh and layout.

    Raises:
        CheckpointError: The data are not those of the training, or the checkpoint is damaged.
    """
    task = task_class(settings.task)(settings, mesh, say)
    if task.digest != saved.manifest.about.get("data_digest"):
        raise CheckpointError(
            f"the checkpoint {saved.manifest.folder} was trained on other data than its settings"
            " lead to now: a file has changed, or a collection was fetched again.",
            "Evaluate where it was trained, or train again.",
        )
    evaluator = Evaluator(task, task.build(settings, task.config), layout)
    checkpoint.load(saved.manifest, evaluator.variables, extra=True)
    return evaluator.evaluate(settings.evaluate.final_windows), task.sample(evaluator.variables, layout)
