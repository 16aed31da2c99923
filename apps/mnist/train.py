"""Trains the network in one layout, tests it, and puts bytes predicted and counted side by side.

Knows no MPI: the mesh may be simulated or real.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import meshmpi as mm
from apps.mnist.data import Digits, Mnist
from apps.mnist.model import Config, build
from meshmpi.compiler.cost import bytes_by_collective

TEST_BATCH = 1000


class Result(NamedTuple):
    """A finished training.

    Attributes:
        accuracy: Share of the test images whose class is right.
        bytes_predicted, bytes_counted: Kind of collective -> what this rank sends in one step.
    """

    losses: list[float]
    accuracy: float
    train_seconds: float
    test_seconds: float
    bytes_predicted: dict[str, int]
    bytes_counted: dict[str, int]
    program: Any

    @property
    def times(self) -> str:
        return f"{self.train_seconds:.1f} s of training and {self.test_seconds:.1f} s of testing"


def bytes_text(result: Result) -> str:
    """Predicted and counted bytes of the first rank, by collective."""
    lines = [f"  {'bytes sent per step, rank 0':30}{'predicted':>12}{'counted':>12}"]
    for kind in dict.fromkeys([*result.bytes_predicted, *result.bytes_counted]):
        predicted, counted = result.bytes_predicted.get(kind, 0), result.bytes_counted.get(kind, 0)
        verdict = "" if predicted == counted else "   DIFFERS"
        lines.append(f"  {kind:30}{predicted:>12,}{counted:>12,}{verdict}")
    return "\n".join(lines)


def batches(digits: Digits, batch: int, steps: int, seed: int) -> Iterator[Digits]:
    """``steps`` batches; every epoch in another order, and each image at most once in an epoch."""
    if batch > len(digits.labels):
        raise mm.ConfigError(
            f"a batch of {batch} images is larger than the {len(digits.labels)} there are.", "Take a smaller batch."
        )
    rng, order, at = np.random.default_rng(seed), np.array([], np.int64), 0
    for _ in range(steps):
        if at + batch > len(order):
            order, at = rng.permutation(len(digits.labels)), 0
        chosen = order[at : at + batch]
        at += batch
        yield Digits(digits.images[chosen], digits.labels[chosen])


class _Losses(mm.Callback):
    """Keeps the losses of a run, and the bytes that its first step has sent."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.counted: dict[str, int] = {}

    def on_step(self, step: Any) -> None:
        self.losses.append(step.loss)
        self.counted = self.counted or _counted(self.run.mesh)


def train(
    config: Config,
    data: Mnist,
    mesh: Any,
    layout: str,
    folder: Path,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
    kernels: str = "auto",
    resume: bool = False,
) -> Result:
    """Trains ``config.steps`` steps and tests.

    Args:
        config: Sizes and training.
        data: All digits, on every rank.
        mesh: A new mm.Mesh or mm.SimulatedMesh; its counters start at 0.
        layout: May split batch, height, width, features, deep, hidden and classes.
        folder: For checkpoints and metrics.
        seed: Seed of initial values, dropout and the order of images.
        say: Takes lines of progress.
        kernels: As for `mm.compile`.
        resume: Whether to go on with the run in ``folder``.
    """
    network = build(config, config.batch, is_training=True)
    step = mm.compile(
        network.graph, mesh, layout, fetches=[network.loss], updates=network.updates, seed=seed, kernels=kernels
    )
    kept, began = _Losses(), time.perf_counter()
    fed = ({"images": b.images, "labels": b.labels} for b in batches(data.train, config.batch, config.steps, seed))
    log = {"every": max(1, config.steps // 10), "plot": False}
    done = mm.fit(step, fed, steps=config.steps, folder=folder, log=log, callbacks=[kept], say=say, resume=resume)
    train_seconds, began = time.perf_counter() - began, time.perf_counter()
    if done.stopped_by:
        sys.exit(done.exit_status)
    accuracy = test(config, data.test, step, layout, kernels)
    here = mesh.shape.coordinates(mesh.rank)
    predicted = {kind: sum(table.values()) for kind, table in bytes_by_collective(step.program, here).items()}
    seconds = time.perf_counter() - began
    return Result(kept.losses, accuracy, train_seconds, seconds, predicted, kept.counted, step.program)


def test(config: Config, digits: Digits, step: Any, layout: str, kernels: str = "auto") -> float:
    """Share of ``digits`` that the network with the variables of ``step`` classifies right."""
    count = len(digits.labels)
    batch = next(n for n in range(min(TEST_BATCH, count), 0, -1) if count % n == 0)
    network = build(config, batch, is_training=False)
    tested = mm.compile(
        network.graph, step.mesh, layout, fetches=[network.right], variables=step.variables, kernels=kernels
    )
    right = 0
    for k in range(0, count, batch):
        part = Digits(digits.images[k : k + batch], digits.labels[k : k + batch])
        right += tested(images=part.images, labels=part.labels)[network.right]
    return right / count


def _counted(mesh: Any) -> dict[str, int]:
    """Kind of collective -> bytes that the first rank of this process has sent so far."""
    counters = mesh.counters[0] if isinstance(mesh.counters, list) else mesh.counters
    return {kind: sum(row[2] for row in table.values()) for kind, table in counters.items()}
