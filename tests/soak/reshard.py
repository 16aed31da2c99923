"""Checkpoints of every layout read in every other: all ordered pairs, bit-equal.

Simulated meshes of up to 40 ranks; uneven blocks, ranks that hold nothing, storage layouts.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

from meshmpi import checkpoint
from tests.soak.rows import Row
from tests.soak.stores import LAYOUTS, equal, store, values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(options: argparse.Namespace) -> Iterator[Row]:
    """One row: all pairs."""
    layouts = LAYOUTS[:4] if options.quick else LAYOUTS
    given, problems = values(options.seed, wide=True), []
    with tempfile.TemporaryDirectory() as folder:
        written = {
            placed: checkpoint.save(Path(folder, str(k)), store(placed, given, True), k, {})
            for k, placed in enumerate(layouts)
        }
        for a, b in itertools.product(layouts, layouts):
            there = store(b, wide=True)
            checkpoint.load(written[a], there)
            problems.append("" if equal(there, given) else f"{a} -> {b}")
    yield Row.of("reshard, all ordered pairs", problems, f"{len(layouts)} layouts")
