"""The whole bench: ``python -m apps.bench`` or ``make bench``; ``--quick`` takes a few minutes.

Writes ``bench.md``, ``bench.json`` and ``bench.png`` into its folder, after each part anew, so that
an interrupted run keeps what it has.  What the figures mean: docs/performance.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from apps.bench import (
    collectives,
    decoding,
    esm2,
    goals,
    lowering,
    overhead,
    peer_attention,
    peer_loops,
    peers,
    plot,
    predictions,
    scaling,
    startup,
    tables,
    workers,
)
from apps.bench.bench import FULL, QUICK, TINY, Bench
from apps.bench.step import rounds
from apps.bench.tables import Table
from meshmpi.errors import MeshmpiError
from meshmpi.kernels import product_choice

PARTS: Mapping[str, Callable[[Bench], list[Table]]] = {
    "step": rounds.measure,
    "loops": peer_loops.measure,
    "attention": peer_attention.measure,
    "collectives": collectives.measure,
    "scaling": scaling.measure,
    "startup": startup.measure,
    "lowering": lowering.measure,
    "overhead": overhead.measure,
    "predictions": predictions.measure,
    "esm2": esm2.measure,
    "decoding": decoding.measure,
}
EFFORTS = {"full": FULL, "quick": QUICK, "tiny": TINY}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the parts asked for; returns 1 if one of them failed."""
    options = _parser().parse_args(arguments)
    if arguments is None:  # the command, not a call
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception: workers are ended
    began = time.perf_counter()

    def say(line: str) -> None:
        print(f"[{time.perf_counter() - began:5.0f} s] {line}", flush=True)

    for variable in workers.forget_slowing_variables():
        say(f"unset {variable}: it would slow what is measured")
    folder = options.out.resolve()
    found = (
        peers.without("--no-peers")
        if options.no_peers
        else peers.install((options.peers or folder / "peers").resolve(), say)
    )
    effort = EFFORTS["tiny" if options.tiny else "quick" if options.quick else "full"]
    asked = {"rounds": options.rounds, "steps": options.steps}
    effort = effort._replace(**{name: n for name, n in asked.items() if n})
    bench = Bench(folder, effort, found, say)
    status = _measure(bench, options.part or list(PARTS))
    say(f"wrote {folder / 'bench.md'}")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m apps.bench", description=__doc__.split("\n")[0])
    parser.add_argument(
        "part", nargs="*", choices=[*PARTS, []], metavar="part", help=f"by default all: {', '.join(PARTS)}"
    )
    parser.add_argument("--quick", action="store_true", help="at most five minutes")
    parser.add_argument("--tiny", action="store_true", help="a toy model: tries the bench itself")
    parser.add_argument("--rounds", type=int, default=0, help="in which the systems take turns")
    parser.add_argument("--steps", type=int, default=0, help="timed ones of a system and round")
    parser.add_argument("--out", type=Path, default=workers.ROOT / "bench-out")
    parser.add_argument("--peers", type=Path, help="their environment; by default <out>/peers")
    parser.add_argument("--no-peers", action="store_true", help="leave PyTorch and JAX out")
    return parser


def _measure(bench: Bench, parts: Sequence[str]) -> int:
    made: list[Table] = []
    status = 0
    for part in parts:
        try:
            made += PARTS[part](bench)
        except MeshmpiError as error:
            status = 1
            bench.say(f"failed: {part}: {error}")
            made.append(Table(part, part, (), (), [f"Failed: {' '.join(str(error).split())}"]))
        tables.write(bench.folder, [goals.table(made), *made], about(bench))
        problem = plot.draw(made, bench.folder / "bench.png")
        if problem and part == parts[-1]:
            bench.say(problem)
    for table in [goals.table(made), *made]:
        print(f"\n{table.markdown()}", end="")
    return status


def about(bench: Bench) -> dict[str, str]:
    """The machine, versions and effort of a run."""
    library = product_choice.chosen()
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "processor": f"{processor_name()}, {os.cpu_count()} cores, load before this line {os.getloadavg()[0]:.1f}",
        "Python": f"{platform.python_version()} on {platform.platform()}",
        "matrix products": f"{library.name} {library.version}",
        "effort": str(bench.effort._asdict()),
        "peers": ", ".join(n for n in peers.REQUIREMENTS if bench.peers.has(n)) or "none",
    }


def processor_name() -> str:
    """As Linux calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "unknown")


if __name__ == "__main__":
    sys.exit(main())
