"""The speed of a machine in numbers: products, memory, elementwise functions, networks.

`meshmpi calibrate` measures such a description; one written by hand needs four numbers. Everything is per rank *while
all ranks of a host work*, as in a program. Independent of programs and MPI; `timing.py` uses it.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshmpi.dims import Axes, MeshShape
from meshmpi.errors import ConfigError
from meshmpi.ir.kinds import bytes_sent

_CLASSES = {
    "simple": (1.0, ()),
    "divide": (4.0, ("divide", "floordiv", "mod", "sqrt", "rsqrt", "reciprocal")),
    "exp": (8.0, ("exp", "sigmoid")),
    "log": (10.0, ("log", "log1p")),
    "tanh": (12.0, ("tanh",)),
    "erf": (12.0, ("erf",)),
    "power": (20.0, ("power",)),
    "trigonometric": (15.0, ("sin", "cos")),
    "random": (12.0, ("random",)),
}
"""Class of elementwise functions -> their cost as a multiple of an addition, where nobody measured it, and which they
are; all others are "simple".  Status of the costs: assumption; of the order of vectorised C libraries."""
RELATIVE_COSTS = {kind: cost for kind, (cost, _) in _CLASSES.items()}
FUNCTION_CLASSES = {name: kind for kind, (_, names) in _CLASSES.items() for name in names}


@dataclass(frozen=True)
class Curve:
    """A positive quantity by another one: straight between points where both are logarithms."""

    points: tuple[tuple[float, float], ...]  # (at, value), ``at`` ascending; beyond the ends the end values hold

    def __call__(self, at: float) -> float:
        places = [p for p, _ in self.points]
        right = bisect.bisect_left(places, at)
        if right == 0 or right == len(places):
            return self.points[min(right, len(places) - 1)][1]
        (x0, y0), (x1, y1) = self.points[right - 1], self.points[right]
        share = math.log(at / x0) / math.log(x1 / x0)
        return y0 * (y1 / y0) ** share


@dataclass(frozen=True)
class ProductRates:
    """FLOP per second of a matrix product [m, k] x [k, n]."""

    sizes: tuple[int, ...]  # measured sizes of m, n and k, ascending
    # (m, n, k) -> FLOP per second, for every combination of ``sizes``.  One entry of each is a rate that
    # holds for all.
    rates: Mapping[tuple[int, int, int], float]

    def __call__(self, m: float, n: float, k: float) -> float:
        """The rate, interpolated between logarithms; beyond the ends those of the ends."""
        total = 0.0
        for (i, wi), (j, wj), (p, wp) in itertools.product(*map(self._between, (m, n, k))):
            total += wi * wj * wp * math.log(self.rates[i, j, p])
        return math.exp(total)

    def _between(self, x: float) -> list[tuple[int, float]]:
        right = bisect.bisect_left(self.sizes, x)
        if right == 0 or right == len(self.sizes):
            return [(self.sizes[min(right, len(self.sizes) - 1)], 1.0)]
        low, high = self.sizes[right - 1], self.sizes[right]
        share = math.log(x / low) / math.log(high / low)
        return [(low, 1.0 - share), (high, share)]

    @classmethod
    def constant(cls, rate: float) -> ProductRates:
        """The same rate for all sizes."""
        return cls((1,), {(1, 1, 1): rate})


@dataclass(frozen=True)
class Network:
    """Collectives over one set of mesh axes."""

    latency: float  # seconds of one message
    bandwidth: float  # bytes per second that a rank sends while the others send too
    # kind of collective -> (ranks, bytes handed, seconds), as calibrated.  Kinds without rows follow from
    # latency and bandwidth.
    measured: Mapping[str, Sequence[tuple[int, int, float]]] = field(default_factory=dict)

    def seconds(self, kind: str, handed: int, n: int) -> float:
        """Seconds of one collective.

        Args:
            kind: One of `ir.kinds.COLLECTIVES`.
            handed: Bytes that the rank hands to it.
            n: Ranks of the group.
        """
        if n == 1:
            return 0.0
        rows = self.measured.get(kind)
        if not rows:
            return rounds(kind, n) * self.latency + bytes_sent(kind, handed, 1, n) / self.bandwidth
        near = min({r for r, _, _ in rows}, key=lambda r: abs(math.log(r / n)))
        curve = Curve(tuple((max(b, 1), s) for r, b, s in rows if r == near))
        # Of groups that nobody measured: the same bytes on the wire, other rounds of messages.
        wire, least = bytes_sent(kind, handed, 1, n), curve.points[0]
        alike = max(1.0, wire / max(bytes_sent(kind, 1 << 20, 1, near) / (1 << 20), 1e-9))
        seconds = curve(alike)
        if alike > curve.points[-1][0]:  # beyond the last, in proportion
            seconds *= alike / curve.points[-1][0]
        return seconds + least[1] * (rounds(kind, n) / rounds(kind, near) - 1.0)


@functools.lru_cache(256)
def lanes(mesh: MeshShape, axes: Axes, ranks_per_host: int) -> int:
    """Ranks of a group over ``axes`` that each host has at least: the parts of an all_reduce between hosts."""
    groups = mesh.groups(axes)
    return min(n for group in groups for n in Counter(rank // ranks_per_host for rank in group).values())


@functools.lru_cache(256)
def spans_hosts(mesh: MeshShape, axes: Axes, ranks_per_host: int) -> bool:
    """Whether ranks that differ only in ``axes`` are on different hosts, with this many ranks on each."""
    return any(group[0] // ranks_per_host != group[-1] // ranks_per_host for group in mesh.groups(axes))


def axes_between_hosts(mesh: MeshShape, ranks_per_host: int) -> Axes:
    """The axes of a mesh along which some neighbours are on different hosts; none if ``ranks_per_host`` is 0."""
    return mesh.axes_between([r // ranks_per_host for r in range(mesh.size)]) if ranks_per_host else ()


def shared_axes(mesh: MeshShape, machine: Machine | None) -> Axes:
    """The axes along which ranks share the memory of a host of the machine; None: of this one."""
    if machine is not None and not machine.ranks_per_host:
        return ()
    between = () if machine is None else axes_between_hosts(mesh, machine.ranks_per_host)
    return tuple(a for a in mesh.names if a not in between)


def rounds(kind: str, n: int) -> int:
    """Messages one after the other that a collective takes: the usual tree algorithms."""
    steps = max(1, math.ceil(math.log2(n)))
    return {"all_reduce": 2 * steps, "shift": 1}.get(kind, steps)


@dataclass(frozen=True)
class Machine:
    """What one rank can do while all ranks work."""

    name: str
    products: Mapping[str, ProductRates]  # data type -> rates of matrix products
    memory: Curve  # bytes that a loop touches -> bytes per second
    operations: Mapping[str, float]  # class of `RELATIVE_COSTS` -> seconds for one element in float32
    call: float  # seconds to start one instruction
    step: float  # seconds of a step that belong to no instruction
    # mesh axes joined by + -> network; "" is for axes that are not named, inside a host where
    # ``ranks_per_host`` is known
    networks: Mapping[str, Network]
    memory_bytes: int = 0  # memory of one rank; 0: not known
    origin: str = "stated"  # where the numbers come from, for reports
    # seconds that ranks computed since they last met in a collective -> seconds that they wait for the
    # slowest in the next one; None: all are as fast
    waits: Curve | None = None
    disturbed: str = ""  # what disturbed the measurements, for people; empty: nothing that is known
    ranks_per_host: int = 0  # consecutive ranks of a mesh that share a host; 0: not known, or it makes no difference
    # network of axes along which ranks are on different hosts, and have no network of their own
    between: Network | None = None

    def wait(self, computed: float) -> float:
        """Seconds that a rank waits in a collective, ``computed`` seconds after the last one.

        Below the first point in proportion: ranks that compute nothing do not drift apart.
        """
        if self.waits is None or computed <= 0.0:
            return 0.0
        return self.waits(computed) * min(1.0, computed / self.waits.points[0][0])

    def product_rate(self, dtype: str, m: int, n: int, k: int) -> float:
        """FLOP per second of a product; types without rates take float32's, by their width."""
        if dtype in self.products:
            return self.products[dtype](m, n, k)
        return self.products["float32"](m, n, k) * (0.5 if dtype == "float64" else 1.0)

    def network(self, mesh: MeshShape, axes: Axes) -> Network:
        """The network of a set of axes of a mesh: its own, else the slowest of theirs.

        Raises:
            ConfigError: There is none, or they connect hosts and only the inside of a host is described.
        """
        key = "+".join(axes)
        if key in self.networks:
            return self.networks[key]
        if self.ranks_per_host and spans_hosts(mesh, axes, self.ranks_per_host):
            if self.between is None:
                raise ConfigError(
                    f"machine '{self.name}' has {self.ranks_per_host} ranks per host and no network between hosts,"
                    f" which mesh {mesh} needs over {key}.",
                    "Add latency and bandwidth under [between], or calibrate on several hosts.",
                )
            return self.between
        found = [self.networks.get(a) or self.networks.get("") or self.between for a in axes]
        known = [n for n in found if n is not None]
        if not known:
            raise ConfigError(
                f"machine '{self.name}' has no network for mesh axis '{axes[0]}'.",
                "Add latency and bandwidth under [network], for all axes.",
            )
        return min(known, key=lambda n: n.bandwidth)

    def collective(self, mesh: MeshShape, axes: Axes, kind: str, handed: int) -> float:
        """Seconds of a collective over axes of a mesh, to which each rank hands so many bytes.

        Between hosts an all_reduce, all_gather or reduce_scatter goes by lanes: those between equal ranks of all hosts
        move what crosses the network, the ranks of each host the rest.
        """
        n, network = mesh.count(axes), self.network(mesh, axes)
        inside, r = self.networks.get(""), 1
        if kind in ("all_reduce", "all_gather", "reduce_scatter") and network is self.between and inside is not None:
            r = lanes(mesh, axes, self.ranks_per_host)
        if r == 1 or inside is None:
            return network.seconds(kind, handed, n)
        hosts = max(2, n // r)
        if kind == "all_gather":
            return network.seconds(kind, handed, hosts) + inside.seconds(kind, hosts * handed, r)
        here = inside.seconds("reduce_scatter", handed, r)
        if kind == "all_reduce":
            here += inside.seconds("all_gather", handed, r)
        return here + network.seconds(kind, -(-handed // r), hosts)

    def operation(self, function: str) -> float:
        """Seconds of a scalar function on one float32 element."""
        return 0.0 if function == "identity" else self.operations[FUNCTION_CLASSES.get(function, "simple")]

    @property
    def peak(self) -> float:
        """FLOP per second of the fastest float32 product."""
        return self.peak_of("float32")

    def peak_of(self, *dtypes: str) -> float:
        """FLOP per second of the fastest product in these types; others are as float32."""
        known = {d if d in self.products else "float32" for d in dtypes}
        return max(max(self.products[d].rates.values()) for d in known or {"float32"})


def operations_from(simple: float, known: Mapping[str, float] | None = None) -> dict[str, float]:
    """Seconds of every class, from those of an addition and of the classes that are known."""
    return {c: simple * r for c, r in RELATIVE_COSTS.items()} | dict(known or {})
