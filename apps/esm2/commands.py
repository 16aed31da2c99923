"""What the commands do: files in, lines and files out.  Only rank 0 prints and writes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import meshmpi as mm
from apps.esm2 import embedding, fasta, layouts, models, planning, scoring
from apps.esm2.inference import Build, Inference, residue_losses, residue_vectors, sums_of_vectors
from apps.esm2.rows import Window, windows
from apps.esm2.weights import open_model
from meshmpi.errors import ConfigError, DataError
from meshmpi.runtime.agreement import from_first
from meshmpi.runtime.world import world_size
from meshmpi.training.signals import STOPPED


class Job(NamedTuple):
    """What scoring and embedding have in common.

    Attributes:
        records: The proteins.
        parts: Their windows.
        run: The model.
        multiple: Rows of a batch are a multiple of this, so that ranks have equally many.
        say: Prints on rank 0.
    """

    records: list[fasta.Record]
    parts: list[Window]
    run: Inference
    multiple: int
    say: Callable[[str], None]


def _mesh(splits: layouts.Splits) -> Any:
    ranks = world_size()
    return mm.Mesh(splits.mesh) if ranks > 1 else mm.SimulatedMesh(splits.mesh)


def _job(options: argparse.Namespace, build: Build) -> Job:
    """Everything is checked before the model is built, and the model before weights are read."""
    for name in ("tokens", "longest", "window"):
        least = 1 if name == "tokens" else 0
        if getattr(options, name) < least:
            raise ConfigError(f"--{name} is {getattr(options, name)}.", f"Give at least {least}.")
    splits = layouts.splits(options.layout, world_size(), options.mesh)
    mesh = _mesh(splits)
    records = from_first(mesh, lambda: fasta.read(options.fasta, unknown_as_x=options.unknown_as_x))
    from_first(mesh, lambda: open_model(options.model) and None)  # an error is told once
    model = open_model(options.model)
    longest = options.longest or model.longest
    parts = windows(records, longest, options.window, str(options.fasta))
    rows = mm.Layout(splits.layout).axes("batch")
    run = Inference(model.config, mesh, splits, build, model.fill)
    say = print if mesh.rank == 0 else (lambda line: None)
    return Job(records, parts, run, mesh.shape.count(rows), say)


def score(options: argparse.Namespace) -> int:
    """Prints name, residues, log-likelihood and perplexity of every protein, tab-separated."""
    scoring.rounds(options.masked_share)
    job = _job(options, residue_losses)
    found = scoring.score(job.records, job.parts, job.run, options.tokens, options.masked_share, job.multiple)
    job.say("name\tresidues\tlog_likelihood\tperplexity")
    for s, record in zip(found, job.records, strict=True):
        job.say(f"{s.name}\t{len(s.residues)}\t{s.total:.4f}\t{s.perplexity:.4f}")
        if options.per_residue:
            for k, (letter, value) in enumerate(zip(record.sequence, s.residues, strict=True), 1):
                job.say(f"\t{k}\t{letter}\t{value:.4f}")
    count = sum(len(s.residues) for s in found)
    total = sum(s.total for s in found)
    job.say(f"all\t{count}\t{total:.4f}\t{math.exp(-total / count):.4f}")
    job.say(f"# {job.run.report()}")
    return 0


def embed(options: argparse.Namespace) -> int:
    """Writes vectors to a .npz file: ``names``, ``embeddings``, and ``starts`` for residues."""
    if options.out.suffix != ".npz":
        raise ConfigError(f"--out is {options.out}.", "Give the name of a .npz file.")
    job = _job(options, residue_vectors if options.per_residue else sums_of_vectors)
    arrays = {"names": np.array([r.name for r in job.records])}
    if options.per_residue:
        vectors, starts = embedding.per_residue(job.records, job.parts, job.run, options.tokens, job.multiple)
        arrays |= {"embeddings": vectors, "starts": starts}
    else:
        arrays["embeddings"] = embedding.means(job.records, job.parts, job.run, options.tokens, job.multiple)
    from_first(job.run.mesh, lambda: _write(options.out, arrays))
    shape = " x ".join(map(str, arrays["embeddings"].shape))
    job.say(f"wrote {options.out}: {len(job.records)} proteins, {shape} numbers")
    job.say(job.run.report())
    return 0


def _write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            np.savez(file, **arrays)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}.", "Give another --out.") from error


def plan(options: argparse.Namespace) -> int:
    """Prints what a model of a published size takes on a mesh."""
    for name in ("ranks", "batch", "length"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} is {getattr(options, name)}.", "Give at least 1.")
    config = models.esm2(options.size, options.length)
    splits = layouts.splits(options.layout, options.ranks, options.mesh)
    print(planning.report(config, splits, options.batch, options.length, options.what))
    return 0


def train(options: argparse.Namespace) -> int:
    """Trains as the settings say."""
    from apps.esm2.task import ProteinTask
    from meshmpi.transformer.training.config import load
    from meshmpi.transformer.training.run import train as run
    from meshmpi.transformer.training.settings import Settings

    overrides = list(options.set)
    if options.layout in layouts.NAMES:
        splits = layouts.splits(options.layout, world_size(), options.mesh or "")
        overrides += [
            f"mesh.shape={splits.mesh}",
            f"mesh.layout={splits.layout}",
            f"mesh.storage={splits.storage or ''}",
            f"model.residual_constraint={splits.residual}",
        ]
    else:
        for key, value in (("shape", options.mesh), ("layout", options.layout)):
            if value is not None:
                overrides.append(f"mesh.{key}={value}")
    settings = load(Settings, options.config, overrides)
    folder = options.out or Path("runs", options.config.stem)
    result = run(settings, folder, resume=options.resume, task=ProteinTask)
    return STOPPED if result.stopped_by else 0
