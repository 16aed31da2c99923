"""A run that was trained, opened again: its settings, its vocabulary, its model on any mesh."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshmpi import checkpoint
from meshmpi.api import compile as compile_step
from meshmpi.errors import CheckpointError
from meshmpi.nn.transformer import TransformerConfig
from meshmpi.train.config import from_dict
from meshmpi.train.evaluation import Evaluation, Evaluator
from meshmpi.train.settings import Settings
from meshmpi.train.tasks.base import Sample
from meshmpi.train.tasks.registry import task_class
from meshmpi.train.vocabulary import Vocabulary, restore_vocabulary


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint and what it says of its run.

    Attributes:
        manifest: Of the checkpoint.
        settings: Of the run.
        vocabulary: What its tokens mean.
    """

    manifest: checkpoint.Manifest
    settings: Settings
    vocabulary: Vocabulary

    @property
    def config(self) -> TransformerConfig:
        """The Transformer of the run."""
        task = task_class(self.settings.task)
        return task.transformer(self.settings, self.vocabulary.size)


def open_run(run: str | os.PathLike[str]) -> SavedRun:
    """Reads the manifest of a checkpoint, or of the newest one of a run.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    run = Path(run)
    found = [run] if (run / "manifest.json").exists() else checkpoint.find(run / "checkpoints")
    if not found:
        raise CheckpointError(
            f"there is no checkpoint in {run}.", "Give the folder of a run, as runs/quickstart."
        )
    manifest = checkpoint.read_manifest(found[0])
    settings = from_dict(Settings, manifest.about["settings"])
    return SavedRun(manifest, settings, restore_vocabulary(manifest.about["vocabulary"]))


def evaluate_run(
    saved: SavedRun, settings: Settings, mesh: Any, layout: str, say: Callable[[str], None]
) -> tuple[Evaluation, Sample]:
    """The held-out loss of a trained model, and the sample that its task shows.  Collective.

    Args:
        saved: The run.
        settings: Its settings, some perhaps changed (as the number of sentences for BLEU).
        mesh: A Mesh, or a SimulatedMesh; it need not be that of the training.
        layout: Computation layout.
        say: Takes lines of progress.

    Raises:
        CheckpointError: The data are not those of the training, or the checkpoint is damaged.
    """
    task = task_class(settings.task)(settings, mesh, say)
    if task.digest != saved.manifest.about.get("data_digest"):
        raise CheckpointError(
            f"the checkpoint {saved.manifest.folder} was trained on other data than its settings"
            " lead to now: a file has changed, or a collection was fetched anew.",
            "Evaluate where it was trained, or train again.",
        )
    built = task.build(settings, task.config)
    step = compile_step(
        built.graph, mesh, layout, fetches=[built.held_out_loss],
        storage=settings.mesh.storage or None, seed=settings.train.seed,
    )  # fmt: skip
    checkpoint.load(saved.manifest, step.variables, extra=True)
    evaluator = Evaluator(
        step, built.held_out_feeds, lambda rows: task.held_out(built.evaluation_batch, rows),
        task.evaluation,
    )  # fmt: skip
    evaluation = evaluator.evaluate(settings.evaluate.final_windows)
    return evaluation, task.sample(step.variables, layout)
