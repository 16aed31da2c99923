"""Measures the speed of this machine, as a `planner.machine.Machine`.

All ranks of a mesh measure at the same time, with the kernels of programs, because cores share memory and caches. The
slowest rank counts, as in a step. Measurements that differ much between repeats are repeated.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from meshmpi.api import compile as compile_step
from meshmpi.dims import Shape
from meshmpi.graph import Graph, Tensor
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.sources import get_variable
from meshmpi.ir.halos import HaloExchange
from meshmpi.ir.kinds import bytes_sent
from meshmpi.kernels import blas, product_choice
from meshmpi.kernels.native import available
from meshmpi.kernels.views import BFLOAT16
from meshmpi.planner.disturbance import disturbances, look
from meshmpi.planner.machine import Curve, Machine, Network, ProductRates, operations_from, rounds
from meshmpi.runtime import operands
from meshmpi.runtime.agreement import gathered
from meshmpi.runtime.cores import cgroup_quota, group_memory
from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.runtime.simulated_mesh import SimulatedMesh
from meshmpi.version import VERSION

PRODUCT_SIZES: tuple[int, ...] = (8, 32, 128, 512, 2048)
"""Extents of m, n and k that are measured, in all combinations."""
MEMORY_BYTES: tuple[int, ...] = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28)
"""Bytes touched by the loops over memory."""
MESSAGE_BYTES: tuple[int, ...] = (64, 1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
"""Bytes handed to collectives."""
_CACHED = 1 << 16  # elements of loops whose arithmetic is measured: they stay in the cache
_CHAIN = 4  # functions one after the other
WORK_SECONDS: tuple[float, ...] = (1e-4, 1e-3, 1e-2)
"""Between two collectives, when it is measured how long ranks wait for one another."""
_SECONDS = 0.004  # of one measurement, at least: longer than a clock's and a barrier's error
_SLICE_SECONDS = 0.003  # for which Linux lets a process compute before another has its turn
_TURNS = 10  # a measurement contains at least this many
Say = Callable[[str], None]
MOST_SPREAD, MOST_TRIES = 0.3, 4
"""Where the median of the repeats is this share above the least, they are done again: at least half
of them were disturbed.  So often at most."""
T = TypeVar("T")
Rows = dict[str, dict[tuple[int, int], float]]
"""Kind of collective -> ranks, bytes handed -> seconds."""

_CHAINS: dict[str, Callable[[Tensor], Tensor]] = {
    # each maps (0, 1] into itself, nearly, so that a chain meets ordinary numbers
    "simple": lambda x: ew.multiply(x, 0.999),
    "divide": ew.sqrt,
    "exp": ew.sigmoid,
    "log": ew.log1p,
    "tanh": ew.tanh,
    "erf": ew.erf,
    "power": lambda x: ew.pow(x, 0.7),
    "trigonometric": ew.cos,
}


def calibrate(mesh: AnyMesh, repeats: int = 5, quick: bool = False, say: Say = lambda line: None) -> Machine:
    """Measures this machine on all ranks of a mesh.  Collective; about half a minute.

    Args:
        mesh: A Mesh: each set of its axes is measured as a network.  Or a SimulatedMesh of one
            rank, which has no network.
        repeats: How often each measurement is made; the median counts.
        quick: Leave out the largest sizes: takes seconds, for a rougher description.
        say: Takes lines of progress, on rank 0 only.
    """
    probe = _Probe(mesh, repeats, say if mesh.rank == 0 else lambda line: None)
    if quick:
        probe.product_sizes, probe.most_bytes = PRODUCT_SIZES[:-1], 1 << 20
        probe.work_seconds = WORK_SECONDS[:-1]
    products = {"float32": probe.products(np.dtype(np.float32))}
    if blas.find(probe.library).bfloat16:
        products["bfloat16"] = probe.products(BFLOAT16)
    memory, operations, call = probe.memory(), probe.operations(), probe.call()
    (inside, between), waits = probe.networks(), probe.waits()
    disturbed = probe.disturbed()
    if disturbed:
        probe.say(
            f"note: this machine was busy: {disturbed}. Times predicted from this description may"
            " be too long; calibrate again when it is quiet"
        )
    return Machine(
        f"{os.uname().nodename} {mesh.shape}",
        products,
        memory,
        operations,
        call,
        0.0,
        {} if inside is None else {"": inside},
        probe.memory_bytes(),
        f"measured by meshmpi {VERSION} calibrate on {mesh.size} ranks",
        waits,
        disturbed,
        max(Counter(mesh.host_of).values()),
        between,
    )


class _Probe:
    """Measurements on all ranks of a mesh at once."""

    def __init__(self, mesh: AnyMesh, repeats: int, say: Say):
        self.mesh, self.repeats, self.say = mesh, repeats, say
        self.product_sizes, self.most_bytes = PRODUCT_SIZES, max(MEMORY_BYTES)
        self.work_seconds = WORK_SECONDS
        self.alone = mesh.size == 1
        # Where ranks outnumber cores, a short measurement has a core for itself or none at all, as time slices fall.
        # Computing is then timed by processor time, times the ranks on a core; taking turns is in the waits.
        self.sharing = max(self._all(_ranks_on_a_core(self._all((os.uname().nodename, os.sched_getaffinity(0))))))
        self.library = blas.agree(self._all(product_choice.measured(bfloat16=True)))
        self.began, self.measurements, self.unsteady = look(), 0, 0

    def disturbed(self) -> str:
        """What disturbed the measurements so far, see `disturbances`."""
        ranks = self._all(look().since(self.began))
        return disturbances(ranks, self.unsteady, self.measurements, self.sharing > 1.0)

    # ---- clocks ----------------------------------------------------------------------------

    def seconds(self, call: Callable[[], Any]) -> float:
        """Seconds of one call that computes, on the slowest rank, while all ranks call."""
        clock = time.thread_time if self.sharing > 1.0 else time.perf_counter
        return self.sharing * self._slowest(self._median(call, clock, _SECONDS))

    def together(self, call: Callable[[], Any]) -> float:
        """Seconds of one call in which ranks wait for each other."""
        within = _SECONDS if self.sharing == 1.0 else _TURNS * _SLICE_SECONDS
        return self._slowest(self._median(call, time.perf_counter, within))

    def _median(self, call: Callable[[], Any], clock: Callable[[], float], within: float) -> float:
        call()
        began = time.perf_counter()
        call()
        once = self._slowest(time.perf_counter() - began)
        count = max(1, min(10_000, math.ceil(within / max(once, 1e-9))))
        self.measurements += 1
        best = math.inf, math.inf  # spread, median
        for _ in range(MOST_TRIES):
            found = []
            for _ in range(self.repeats):
                self._meet()
                began = clock()
                for _ in range(count):
                    call()
                found.append((clock() - began) / count)
            median = statistics.median(found)
            # All ranks see the same spread, and so try as often.
            spread = self._slowest(median / max(min(found), 1e-12) - 1.0)
            best = min(best, (spread, median))
            if spread <= MOST_SPREAD:
                break
        else:
            self.unsteady += 1
        return best[1]

    def _slowest(self, seconds: float) -> float:
        return max(self._all(seconds))

    def _all(self, mine: T) -> list[T]:
        return gathered(self.mesh, mine, "calibrate")

    def _meet(self) -> None:
        if self.mesh.comm is not None and not self.alone:
            self.mesh.outside("calibrate", self.mesh.comm.Barrier)()

    # ---- products ----------------------------------------------------------------------------

    def products(self, dtype: np.dtype) -> ProductRates:
        """Rates of all combinations of `PRODUCT_SIZES`, small ones in batches as attention has."""
        self.say(f"matrix products of {dtype.name} by {self.library} ...")
        rates = {}
        for m, n, k in itertools.product(self.product_sizes, repeat=3):
            batch = max(1, min(64, (1 << 21) // (m * k + k * n + m * n)))
            call = self._product(dtype, batch, m, n, k)
            rates[m, n, k] = 2.0 * batch * m * n * k / self.seconds(call)
        return ProductRates(self.product_sizes, rates)

    def _product(self, dtype: np.dtype, batch: int, m: int, n: int, k: int) -> Callable[[], Any]:
        a = np.ones((batch, m, k), dtype)
        b = np.ones((batch, k, n), dtype)
        y = np.zeros((batch, m, n), np.float32 if dtype == BFLOAT16 else dtype)
        return blas.find(self.library).gemm(a, b, y) or functools.partial(np.matmul, a, b, out=y)

    # ---- loops -------------------------------------------------------------------------------

    def memory(self) -> Curve:
        """Bytes per second of z = x + y by the bytes of all three."""
        self.say("memory ...")
        sizes = [b for b in MEMORY_BYTES if b <= self.most_bytes]
        return Curve(tuple((float(b), b / self.seconds(_loop(b // 12, ew.add))) for b in sizes))

    def operations(self) -> dict[str, float]:
        """Seconds of each class of elementwise functions, on numbers in the cache."""
        self.say("elementwise functions ...")
        known = {}
        copy = self.seconds(_loop(_CACHED, ew.maximum))
        for kind, function in _CHAINS.items():
            run = _loop(_CACHED, lambda x, y, f=function: _chain(f, ew.maximum(x, y)))
            known[kind] = max(1e-13, (self.seconds(run) - copy) / (_CHAIN * _CACHED))
        return operations_from(known["simple"], known)

    def call(self) -> float:
        """Seconds of an instruction that has next to nothing to do."""
        return self.seconds(_loop(4, ew.add))

    def memory_bytes(self) -> int:
        """Memory of this host, or what its control groups allow of it, shared by its ranks."""
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        allowed = group_memory()
        if allowed is not None and allowed < whole:
            whole = allowed
        names = self._all(os.uname().nodename)
        return min(self._all(whole // names.count(os.uname().nodename)))

    def waits(self) -> Curve | None:
        """Seconds that ranks wait for the slowest, by the seconds that each computed before.

        Noise of the machine, and where ranks share cores the time slices of the others.  What
        computing takes is timed in the same loops: a machine drifts from one second to the next.
        """
        if self.alone:
            return None
        self.say("waiting for one another ...")
        zeros = self.mesh.allocate(64).view(np.float32)
        zeros[...] = 0.0
        meet = self.mesh.bind(operands.AllReduce(zeros, self.mesh.shape.names), planned=True)
        product = self._product(np.dtype(np.float32), 1, 64, 64, 64)
        once, meeting = self.seconds(product), self.together(meet)
        points = []
        for count in sorted({max(1, round(work / once)) for work in self.work_seconds}):
            waited = self._waited(product, count, meet, count * once) - meeting
            points.append((count * once, max(1e-9, waited)))
        return Curve(tuple(points))

    def _waited(self, product: Callable[[], Any], count: int, meet: Callable[[], Any], work: float) -> float:
        """Seconds of a round of ``count`` products and a meeting, beyond those of the products."""
        clock = time.thread_time if self.sharing > 1.0 else time.perf_counter
        times, found = max(5, math.ceil(_TURNS * 2 * _SLICE_SECONDS / work)), []
        for _ in range(self.repeats):
            self._meet()
            computed, began = 0.0, time.perf_counter()
            for _ in range(times):
                own = clock()
                for _ in range(count):
                    product()
                computed += clock() - own
                meet()
            whole = self._slowest(time.perf_counter() - began)
            found.append((whole - self.sharing * self._slowest(computed)) / times)
        return statistics.median(found)

    # ---- collectives -------------------------------------------------------------------------

    def networks(self) -> tuple[Network | None, Network | None]:
        """Inside a host, and between hosts: measured over every set of axes that has more than one rank."""
        shape, crossing = self.mesh.shape, set(self.mesh.axes_between_hosts)
        axes = [a for a in shape.names if shape.count((a,)) > 1]
        rows: tuple[Rows, Rows] = {}, {}
        for length in range(1, len(axes) + 1):
            for chosen in itertools.combinations(axes, length):
                self.say(f"collectives over {'+'.join(chosen)} ...")
                level = rows[bool(crossing.intersection(chosen))]
                for kind, found in self._collectives(chosen).items():
                    level.setdefault(kind, {}).update({k: max(s, level[kind].get(k, 0.0)) for k, s in found.items()})
        inside, between = map(_network, rows)
        return inside, between

    def _collectives(self, axes: tuple[str, ...]) -> dict[str, dict[tuple[int, int], float]]:
        """Kind -> ranks, bytes handed -> seconds, called as a step calls them."""
        n, measured = self.mesh.shape.count(axes), dict[str, dict[tuple[int, int], float]]()
        for kind, bound in _collectives(self.mesh, axes, n).items():
            measured[kind] = {}
            for size in (b for b in MESSAGE_BYTES if b <= self.most_bytes):
                elements = -(-size // (4 * n)) * n
                measured[kind][n, 4 * elements] = self.together(bound(elements))
        return measured


def _network(measured: Rows) -> Network | None:
    """A level of the network, by the largest groups that were measured; None without any."""
    if not measured:
        return None
    reduced = measured["all_reduce"]
    n = max(ranks for ranks, _ in reduced)
    sizes = [size for ranks, size in reduced if ranks == n]
    latency = reduced[n, min(sizes)] / rounds("all_reduce", n)
    bandwidth = bytes_sent("all_reduce", max(sizes), 1, n) / reduced[n, max(sizes)]
    return Network(latency, bandwidth, {k: [(*at, s) for at, s in sorted(v.items())] for k, v in measured.items()})


def _ranks_on_a_core(places: Sequence[tuple[str, set[int]]]) -> float:
    """How many ranks of this host share a processor, at least 1; ``places``: each rank's host and processors."""
    host = os.uname().nodename
    mine = [mask for name, mask in places if name == host]
    processors, quota = len(set().union(*mine)), cgroup_quota()
    if quota is not None:
        processors = min(processors, max(1, int(quota)))
    return max(1.0, len(mine) / processors)


def _chain(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    for _ in range(_CHAIN):
        x = function(x)
    return x


def _loop(n: int, function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Any]:
    """The bound kernel of an elementwise function of two vectors of ``n`` numbers."""
    ones = np.ones(n, np.float32)
    with Graph() as graph:
        x, y = (get_variable(v, Shape([("n", n)]), initializer=ones) for v in "xy")
        fetched = function(x, y)
    kernels = "native" if available() else "numpy"
    step = compile_step(graph, SimulatedMesh(""), fetches=[fetched], kernels=kernels)
    return step.executor.run


def _collectives(mesh: AnyMesh, axes: tuple[str, ...], n: int) -> dict[str, Callable[[int], Callable[[], Any]]]:
    """Kind -> elements that a rank hands to it -> one such collective, in memory as that of a step."""

    def ones(*sizes: int) -> np.ndarray:
        found = mesh.allocate(4 * math.prod(sizes)).view(np.float32).reshape(sizes)
        found[...] = 1.0
        return found

    def shift(c: int) -> operands.Collective:
        exchange = HaloExchange(n, (c * n,), (c,), c * n, 1, True)
        return operands.Shift([ones(c)], ones(c), 0, exchange, axes, 0.0)

    def reduced(c: int) -> operands.Collective:
        x = ones(c)
        x[...] = 0.0
        return operands.AllReduce(x, axes)

    made: dict[str, Callable[[int], operands.Collective]] = {
        "all_reduce": reduced,
        "all_gather": lambda c: operands.AllGather(ones(c), ones(c * n), 0, [c] * n, axes),
        "reduce_scatter": lambda c: operands.ReduceScatter(ones(c), ones(c // n), 0, [c // n] * n, axes),
        "all_to_all": lambda c: operands.AllToAll(ones(n, c // n), ones(1, c), 0, 1, [1] * n, [c // n] * n, axes),
        "shift": shift,
    }
    return {kind: lambda c, make=make: mesh.bind(make(c), planned=True) for kind, make in made.items()}
