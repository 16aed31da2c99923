"""The systems that are compared on the yardstick step, and how each is started.

Two processes of one thread, each bound to a core, unless the name says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from apps.bench import workers
from apps.bench.bench import Bench
from apps.bench.workers import Result
from meshmpi.errors import ConfigError
from meshmpi.kernels import blas, product_choice

LAYOUTS = {"data-parallel": "batch:all", "model-parallel": "heads:all;d_ff:all;vocab:all"}
BARE = "bare matrix products"
LIBRARIES = ("openblas", "mkl")


class System(NamedTuple):
    """One way to run the step.

    Attributes:
        name: For people.
        run: (bench, timed steps) -> one result per process.
        peer: What must be installed for it, or empty.
        extra: Whether a quick run leaves it out.
    """

    name: str
    run: Callable[[Bench, int], list[Result]]
    peer: str = ""
    extra: bool = False


def bare(library: str = "", split: str = "data") -> Callable[[Bench, int], list[Result]]:
    """Only the products of the step, by this BLAS library (default the one meshmpi takes)."""

    def run(bench: Bench, steps: int) -> list[Result]:
        given = ["--start", str(bench.start()), "--split", split, "--steps", str(steps)]
        named = ["--library", library] if library else []
        return [workers.alone(workers.PYTHON, "step.gemm_step", [*given, *named])]

    return run


def _meshmpi(layout: str, dtype: str = "", library: str = "") -> Callable[[Bench, int], list[Result]]:
    def run(bench: Bench, steps: int) -> list[Result]:
        arguments = [
            "--start",
            str(bench.start()),
            "--mesh",
            "all:2",
            "--layout",
            LAYOUTS[layout],
            "--dtype",
            dtype,
            "--steps",
            str(steps),
        ]
        environment = {blas.VARIABLE: library} if library else {}
        return workers.on_ranks(2, "step.meshmpi_step", arguments, environment=environment)

    return run


def _peer(
    module: str, mode: str, *options: str, processes: int = 2, threads: int = 1
) -> Callable[[Bench, int], list[Result]]:
    def run(bench: Bench, steps: int) -> list[Result]:
        arguments = [mode, "--start", str(bench.start()), "--steps", str(steps), *options]
        return workers.group(processes, bench.peers.python, f"step.{module}", arguments, threads=threads)

    return run


def installed(library: str) -> bool:
    """Whether this BLAS library can be used here."""
    try:
        blas.find(library)
    except ConfigError:
        return False
    return True


def systems(bench: Bench) -> Sequence[System]:
    """All systems that this machine has; those of a peer that is missing are left out."""
    torch, two = "torch_step", ("--threads", "2")
    found = [System(f"meshmpi {layout}", _meshmpi(layout)) for layout in LAYOUTS]
    narrow = product_choice.chosen(bfloat16=True)
    if narrow.bfloat16:  # it multiplies them as they are
        name = f"meshmpi data-parallel, bfloat16 by {narrow.name}"
        found.append(System(name, _meshmpi("data-parallel", "bfloat16", narrow.name)))
    found += [
        System("PyTorch data-parallel (DDP)", _peer(torch, "ddp"), "torch"),
        System("PyTorch tensor-parallel", _peer(torch, "tp"), "torch"),
        System("PyTorch 1 process x 2 threads", _peer(torch, "single", *two, processes=1, threads=2), "torch"),
        System("PyTorch DDP, bfloat16", _peer(torch, "ddp", "--bf16"), "torch"),
        System("JAX 1 process, 2 threads", _peer("jax_step", "single", processes=1, threads=2), "jax"),
        System("JAX data-parallel, gloo", _peer("jax_step", "dp"), "jax", extra=True),
    ]
    default = product_choice.chosen().name
    for library in LIBRARIES:
        if library != default and installed(library):
            run = _meshmpi("data-parallel", library=library)
            found.append(System(f"meshmpi data-parallel, {library}", run, extra=True))
            found.append(System(f"{BARE}, {library}", bare(library), extra=True))
    return [s for s in found if not s.peer or bench.peers.has(s.peer)]
