"""Ways to fill one node with the yardstick: ranks and threads, the time of a step, the memory of all ranks.

``python -m apps.bench.node`` trains a few steps in each way, in turns.  Memory is the largest sum of the
proportional set sizes (PSS) of all ranks, in which what they share counts once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "apps/transformer/configs/yardstick.toml"
STEPS = 12
WARM = 3
"""Steps at the start that do not count."""


class Way(NamedTuple):
    """How a node is filled."""

    ranks: int
    threads: int
    layout: str = "batch:all"
    shared: str = "on"

    def __str__(self) -> str:
        apart = "" if self.shared == "on" else ", nothing shared"
        return f"{self.ranks} x {self.threads} {self.layout}{apart}"


WAYS = (Way(1, 1), Way(1, 2), Way(2, 1), Way(2, 1, shared="off"), Way(2, 1, "heads:all;d_ff:all;vocab:all"), Way(4, 1))


def descendants(pid: int) -> Iterator[int]:
    """The processes that a process has started, and theirs."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            yield child
            yield from descendants(child)


def proportional_bytes(pid: int) -> int:
    """PSS of a process that runs Python; 0 for others."""
    try:
        if not Path(f"/proc/{pid}/exe").resolve().name.startswith("python"):
            return 0
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(1024 * int(row.split()[1]) for row in rows if row.startswith("Pss:"))
    except (OSError, StopIteration):  # it has ended
        return 0


def run(way: Way) -> tuple[list[float], int]:
    """Seconds of each step, and the bytes of all ranks at the peak."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        options = [f"train.steps={STEPS}", "train.log_every=1", "sample.tokens=0", "evaluate.final_windows=2"]
        command = [sys.executable, "-m", "meshmpi.launch", "-n", str(way.ranks), "--threads", str(way.threads)]
        command += ["-m", "apps.transformer", str(CONFIG), "--layout", way.layout, "--out", str(out)]
        command += [word for option in (*options, "checkpoint.every=0") for word in ("--set", option)]
        environment = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
        environment["MESHMPI_SHARED"] = way.shared
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        most = 0
        while process.poll() is None:
            most = max(most, sum(map(proportional_bytes, descendants(process.pid))))
            time.sleep(0.05)
        if process.returncode:
            raise SystemExit(f"{way} ended with status {process.returncode}")
        rows = [json.loads(line) for line in (out / "metrics-rank-00000.jsonl").read_text().splitlines()]
    return [row["seconds"] for row in rows if "loss" in row and "seconds" in row][WARM:], most


def main() -> None:
    """Prints a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="the ways take turns so often")
    options = parser.parse_args()
    seconds: dict[Way, list[float]] = {way: [] for way in WAYS}
    memory = dict.fromkeys(WAYS, 0)
    for _ in range(options.rounds):
        for way in WAYS:
            found, most = run(way)
            seconds[way] += found
            memory[way] = max(memory[way], most)
    alone = memory[WAYS[0]]
    print(f"{'ranks x threads, layout':46} {'ms a step':>10} {'MB of all ranks':>16} {'of one rank':>12}")
    for way in WAYS:
        median = 1e3 * statistics.median(seconds[way])
        print(f"{way!s:46} {median:>10.0f} {memory[way] / 1e6:>16.0f} {memory[way] / alone:>12.2f}")


if __name__ == "__main__":
    main()
