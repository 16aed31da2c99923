r"""Trains a network of the class of LeNet on MNIST, split over a mesh in any dimension.

python -m meshmpi.launch -n 2 -m apps.mnist                       images split by batch
python -m meshmpi.launch -n 2 -m apps.mnist --mesh "rows:2" --layout "height:rows"
python -m meshmpi.launch -n 4 -m apps.mnist --mesh "rows:2;cols:2" \
    --layout "height:rows;width:cols"                                     halos in both dims
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import meshmpi as mm
from apps.mnist.data import load
from apps.mnist.model import Config
from apps.mnist.train import Result, train
from meshmpi.runtime.world import world_size

_FIXED = ("height", "width", "dtype")


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m apps.mnist", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--mesh", help='such as "rows:2;cols:2" (default: all ranks on the axis "all")')
    add("--layout", help='such as "batch:rows;height:cols" (default: batch over all axes)')
    add("--data", help="folder of the four IDX files (default: fetched once with npm)")
    add("--seed", type=int, default=0, help="of weights, dropout and order (default 0)")
    add("--kernels", default="auto", choices=("auto", "native", "numpy"))
    add("--program", action="store_true", help="print the program of a training step")
    for f in fields(Config):
        if f.name not in _FIXED:
            kind = type(f.default)
            add(f"--{f.name.replace('_', '-')}", type=kind, default=f.default, help=f"(default {f.default})")
    return parser.parse_args(arguments)


def bytes_text(result: Result) -> str:
    """Predicted and counted bytes of the first rank, by collective."""
    lines = [f"  {'bytes sent per step, rank 0':30}{'predicted':>12}{'counted':>12}"]
    for kind in dict.fromkeys([*result.bytes_predicted, *result.bytes_counted]):
        predicted, counted = result.bytes_predicted.get(kind, 0), result.bytes_counted.get(kind, 0)
        verdict = "" if predicted == counted else "   DIFFERS"
        lines.append(f"  {kind:30}{predicted:>12,}{counted:>12,}{verdict}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, tests and prints; 0 when bytes are as predicted."""
    options = parsed(arguments)
    config = Config(**{f.name: getattr(options, f.name) for f in fields(Config) if f.name not in _FIXED})
    ranks = world_size()
    mesh: Any = mm.Mesh(options.mesh or f"all:{ranks}") if ranks > 1 else mm.SimulatedMesh(options.mesh or "all:1")
    layout = options.layout
    if layout is None:
        layout = f"batch:{'+'.join(mesh.shape.names)}"
    first = mesh.rank == 0

    def say(line: str) -> None:
        if first:
            print(line, flush=True)

    data = load(options.data)
    say(f"{config.steps} steps of {config.batch} images, '{layout}' on {mesh.shape}")
    result = train(config, data, mesh, layout, options.seed, say, options.kernels)
    if options.program:
        say(str(result.program))
    say(bytes_text(result))
    say(
        f"  {100 * result.accuracy:.2f} % of {len(data.test.labels):,} test images right after"
        f" {result.train_seconds:.1f} s of training and {result.test_seconds:.1f} s of testing"
    )
    return 0 if result.bytes_predicted == result.bytes_counted else 1


if __name__ == "__main__":
    sys.exit(main())
