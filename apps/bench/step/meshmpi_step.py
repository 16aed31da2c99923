"""Worker: the yardstick step in meshmpi, one rank of it; started by the launcher.

Also tells how long each part of starting took, for `apps.bench.startup` and `apps.bench.scaling`.
"""

from __future__ import annotations

import time

from apps.bench.step.yardstick import Sizes, Start, emit, seconds_since_start, timed_steps

CAME, PROCESSOR = seconds_since_start(), time.process_time()

import argparse  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import meshmpi as mm  # noqa: E402
from meshmpi.runtime.trace import Tracer  # noqa: E402
from meshmpi.transformer.tasks.registry import build_training_graph  # noqa: E402
from meshmpi.transformer.training import config  # noqa: E402
from meshmpi.transformer.training.settings import Settings, transformer_config  # noqa: E402

CONFIG = Path(__file__).parents[2] / "transformer/configs/yardstick.toml"
PREFIX = "decoder/"
FREE = ("feed", "read", "view")
"""Kinds of instructions for which nothing is called."""


class Clock:
    """Seconds of the parts of starting, one after the other, on the wall and of the processor."""

    def __init__(self, began: float):
        first = "interpreter and NumPy"
        self._before, self.parts = began, {first: began}
        self._worked, self.processor = PROCESSOR, {first: PROCESSOR}

    def part(self, name: str) -> None:
        now, worked = seconds_since_start(), time.process_time()
        self.parts[name], self._before = now - self._before, now
        self.processor[name], self._worked = worked - self._worked, worked


def settings(sizes: Sizes, dtype: str = "") -> Settings:
    """Those of the yardstick, with other sizes and another type of activations."""
    return config.load(Settings, CONFIG, [*sizes.overrides(), f"model.activation_dtype={dtype}"])


def with_start_values(step: Any, start: Start) -> None:
    """Gives every variable of the model its first value."""
    for name in start.names:
        step.assign({PREFIX + name: start[name]})
    missing = [n for n in step.variables if n.startswith(PREFIX) and n.removeprefix(PREFIX) not in start.names]
    if missing:
        raise SystemExit(f"the bench has no first values for {', '.join(missing)}")


def feeder(step: Any, start: Start) -> Callable[[int], dict[str, Any]]:
    """Step number -> this rank's blocks of tokens and targets."""
    (rows, columns) = (slice(*r) for r in step.feed_block("tokens"))

    def feeds(number: int) -> dict[str, Any]:
        x, y = (mm.local(a[rows, columns]) for a in start.batch(number))
        return {"tokens": x, "targets": y}

    return feeds


def main() -> None:
    """Runs the steps and prints this rank's result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--start", type=Path, required=True, help="file of first values")
    parser.add_argument("--mesh", required=True)
    parser.add_argument("--layout", required=True)
    parser.add_argument("--dtype", default="", help="of activations")
    parser.add_argument("--steps", type=int, default=10, help="timed ones; -1: only set up")
    parser.add_argument("--plan", action="store_true", help="time lowering and passes again, alone")
    parser.add_argument("--traced", action="store_true", help="time steps with a trace as well")
    options = parser.parse_args()
    clock = Clock(CAME)
    clock.part("imports")
    mesh = mm.Mesh(options.mesh)
    clock.part("MPI and mesh")
    start = Start(options.start)
    chosen = settings(start.sizes, options.dtype)
    built = build_training_graph(chosen, transformer_config(chosen.model, 1))
    clock.part("graph")
    asked: dict[str, Any] = {"fetches": [built.loss], "updates": built.updates}
    step = mm.compile(built.graph, mesh, options.layout, **asked)
    clock.part("compile")
    found: dict[str, Any] = {
        "rank": mesh.rank,
        "parts": clock.parts,
        "ready": sum(clock.parts.values()),
        "processor": clock.processor,
    }
    if options.steps >= 0:
        found |= _timed(step, start, built.loss, options.steps)
    if options.traced:
        found["pairs"] = _pairs(step, start, 2 * options.steps)
    if options.plan:
        began = time.perf_counter()
        mm.plan(built.graph, mesh.shape, options.layout, **asked)
        found["plan_seconds"] = time.perf_counter() - began
    emit(**found)


def _timed(step: Any, start: Start, loss: Any, steps: int) -> dict[str, Any]:
    with_start_values(step, start)
    feeds = feeder(step, start)
    communicating: list[float] = []

    def one(number: int) -> float:
        before = step.comm_seconds
        value = step(feeds(number))[loss]
        communicating.append(step.comm_seconds - before)
        return value

    counts = step.program.counts()
    return {
        **timed_steps(one, steps),
        "communicating": communicating[len(communicating) - steps :],
        "held_bytes": step.held_bytes,
        "flops": step.cost.flops,
        "instructions": sum(n for kind, n in counts.items() if kind not in FREE),
    }


def _pairs(step: Any, start: Start, count: int) -> list[tuple[float, float]]:
    """Seconds of steps without and with a trace, in turn, the order changing from pair to pair."""
    feeds, pairs = feeder(step, start), []
    for k in range(count):
        taken = {}
        for traced in (False, True) if k % 2 else (True, False):
            if traced:
                tracer = Tracer(step, 1)
            step.mesh.comm.Barrier()
            began = time.perf_counter()
            step(feeds(k))
            taken[traced] = time.perf_counter() - began
            if traced:
                assert tracer.done
        pairs.append((taken[False], taken[True]))
    return pairs


if __name__ == "__main__":
    main()
