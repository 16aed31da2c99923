r"""Trains a Vision Transformer on MNIST, split over a mesh as the layout says.

python -m meshmpi run -n 2 -m apps.vit
python -m meshmpi run -n 2 -m apps.vit --layout "heads:all;d_ff:all"
python -m meshmpi run -n 2 -m apps.vit --resume auto
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import meshmpi as mm
from apps.mnist.data import load
from apps.vit.model import Config, build
from meshmpi.runtime.world import world_size

TEST_BATCH = 500


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, evaluates and saves; 75 when it was asked to stop."""
    parser = argparse.ArgumentParser(prog="python -m apps.vit", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for name, default in Config()._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--layout", default="batch:all", help="over the axis 'all' (default batch:all)")
    parser.add_argument("--data", help="folder of the four IDX files (default: fetched once with npm)")
    parser.add_argument("--folder", default="run/vit", help="for checkpoints and metrics (default run/vit)")
    parser.add_argument("--resume", default=False, help="auto: go on with the run in the folder, if there is one")
    options = vars(parser.parse_args(arguments))
    layout, folder, resume = options.pop("layout"), options.pop("folder"), options.pop("resume")
    train, test = load(options.pop("data"))
    config, size, ranks = Config(**options), train.images.shape[1], world_size()
    mesh = mm.Mesh(f"all:{ranks}") if ranks > 1 else mm.SimulatedMesh("all:1")

    learns = build(config, config.batch, size, is_training=True)
    fetches = [learns.loss, learns.finite]
    step = mm.compile(learns.graph, mesh, layout, fetches=fetches, updates=learns.updates)
    batch = min(TEST_BATCH, len(test.labels))
    tested = build(config, batch, size, is_training=False)
    check = mm.compile(tested.graph, mesh, layout, fetches=[tested.loss, tested.right], variables=step.variables)

    def evaluate() -> dict[str, float]:
        found = [
            check(images=test.images[k : k + batch], labels=test.labels[k : k + batch])
            for k in range(0, len(test.labels) - batch + 1, batch)
        ]
        right = sum(f[tested.right] for f in found) / (batch * len(found))
        return {"loss": sum(f[tested.loss] for f in found) / len(found), "accuracy": right}

    data = mm.data.reader({"images": train.images, "labels": train.labels}, batch=config.batch)
    how = {"evaluate": evaluate, "evaluate_every": 200, "checkpoint": 200, "finite": learns.finite, "resume": resume}
    return mm.fit(step, data, steps=config.steps, folder=folder, **how).exit_status


if __name__ == "__main__":
    sys.exit(main())
