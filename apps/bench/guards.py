"""What all guards together cost in a step of the yardstick: trained with them, and without.

    python -m apps.bench.guards [--rounds 6] [--ranks 2]

With: the record of collectives, the watchdog, the checks of numbers, the comparison of replicas
(every step, though the default is every hundredth), the hashes of tokens.  Without: none of them.
Both take turns, forwards and backwards, so that a machine that drifts favours neither; the first
steps, which touch memory and tokens for the first time, are left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from meshmpi.launch.launch import launch
from meshmpi.training.metrics import read_metrics

CONFIG = Path(__file__).parents[1] / "transformer/configs/yardstick.toml"
WARMING = 5
KINDS = {
    "with guards": ["guard.non_finite=stop", "guard.replica_every=1"],
    "with guards, as by default": [],
    "without": ["guard.non_finite=off", "guard.replica_every=0"],
}
"""Kind of run -> its settings."""


def main() -> int:
    """Runs all kinds in turn and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--set", action="append", default=[], help="of the trainer, as for train")
    options = parser.parse_args()
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(options.rounds):
        for kind in list(KINDS) if number % 2 else reversed(KINDS):
            found[kind].append(_run(kind, options))
            print(f"round {number + 1}, {kind}: {1e3 * found[kind][-1]:.2f} ms a step", flush=True)
    plain = statistics.median(found["without"])
    for kind, seconds in found.items():
        pairs = [a / b - 1 for a, b in zip(seconds, found["without"], strict=True)]
        print(
            f"{kind:28} {1e3 * statistics.median(seconds):9.2f} ms a step"
            f" {statistics.median(seconds) / plain - 1:+8.2%}, pairwise"
            f" {statistics.median(pairs):+8.2%} ({min(pairs):+.2%} to {max(pairs):+.2%})"
        )
    return 0


def _run(kind: str, options: argparse.Namespace) -> float:
    """Median seconds of a step, of the slowest rank."""
    with tempfile.TemporaryDirectory() as folder:
        given = [f"train.steps={options.steps}", "evaluate.final_windows=1", *KINDS[kind]]
        words = [w for setting in (*given, *options.set) for w in ("--set", setting)]
        done = launch(
            options.ranks,
            ["-m", "apps.bench.guards", "worker", kind, str(CONFIG), "--out", folder, *words],
            timeout_seconds=1800,
            capture_output=True,
            environment={"MESHMPI_WATCHDOG": "0"} if kind == "without" else {},
        )
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        ranks = [
            [float(r["seconds"]) for r in read_metrics(folder, k) if "seconds" in r][WARMING:]
            for k in range(options.ranks)
        ]
        return max(statistics.median(seconds) for seconds in ranks)


def worker(kind: str, arguments: list[str]) -> int:
    """Trains in this process, a rank of the job."""
    from meshmpi import cli
    from meshmpi.guard import flight
    from meshmpi.transformer.training import sealed

    if kind == "without":
        flight.start = lambda rank, size: None
        sealed.CheckedArray._check = lambda self, k: None
    return cli.main(["train", *arguments])


if __name__ == "__main__":
    sys.exit(worker(sys.argv[2], sys.argv[3:]) if sys.argv[1:2] == ["worker"] else main())
