"""verify(): every layout computes what one rank does, or which operation does not.

One rank runs the graph op by op (`interpret`) with an error bound beside every value (`bounds`).
A layout is run twice: as lowered, where every tensor of the graph is a value of the program, and as
the passes leave it.  Each rank's block of each tensor is compared with the same block of the
reference, so that replicas which differ from each other are found as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Union

import numpy as np

from meshmpi.checking.bounds import Bounds, distance
from meshmpi.checking.feeds import random_feeds
from meshmpi.checking.interpret import (
    Reference,
    by_value,
    initial_variables,
    interpret,
    lowered_with_values,
    named_fetches,
    needed_tensors,
    reference,
    run,
)
from meshmpi.checking.layouts import legal_layouts
from meshmpi.checking.observe import Blocks, run_observed
from meshmpi.checking.report import Check, Difference, Report
from meshmpi.checking.widen import widened
from meshmpi.dims import Layout, LayoutLike, MeshShape
from meshmpi.errors import ConfigError, LayoutError, MeshmpiError
from meshmpi.graph import Graph, Tensor, Update
from meshmpi.passes import pipeline
from meshmpi.program import Instruction, LocalType, Program, Source
from meshmpi.runtime.simulated_mesh import SimulatedMesh
from meshmpi.typerules import Violation
from meshmpi.typerules import verify as check_types

PRECISIONS = ("float64", "own")
Meshes = Union[str, MeshShape, Sequence[Union[str, MeshShape]]]
FAILURES = (MeshmpiError, Violation, ValueError, LookupError, AssertionError)
"""How a broken program shows when it is lowered, rewritten or run."""


def verify(
    graph: Graph, layouts: str | Sequence[LayoutLike] = "all", mesh: Meshes = "rows:2;cols:2",
    fetches: Sequence[Tensor] | Mapping[str, Tensor] | None = None,
    updates: Sequence[Update] | None = None, feeds: Mapping[str, Any] | None = None, *,
    ranks: str = "simulated", sample: int | None = None, precision: str = "float64",
    variables: Mapping[str, Any] | None = None, warm_steps: int = 1, storage: LayoutLike = None,
    kernels: str = "numpy", seed: int = 0,
) -> Report:  # fmt: skip
    """Runs a graph in many layouts and compares every tensor with what one rank computes.

    The bound of a tensor is what rounding can come to in any order of summation, to first order:
    for a sum of n terms (n + 5) u sum |terms|, u the unit roundoff, carried through the graph by
    running error analysis (Higham, Accuracy and Stability of Numerical Algorithms, sections 3.3 and
    4.2; `meshmpi.checking.bounds` says all of it).  Nothing is tuned: a difference beyond it is a
    mistake, or an overflow.  Elements that hang on a decision within rounding (the larger of two
    equal numbers) have no bound; they are counted as undecided.

    Args:
        graph: With gradients and updates, of sizes that one process can hold: every tensor is kept
            whole, in float64, with its bound.
        layouts: "all" legal ones, or those to try.
        mesh: One mesh shape or several.
        fetches: Default: every tensor that no operation uses.
        updates: Default: those registered with the graph.
        feeds: Placeholder name -> array; default: random numbers.
        ranks: "simulated", or "mpi": this process is one rank of a job of as many ranks as the mesh
            has; all ranks must call it.
        sample: Most layouts for each mesh, where "all" are more; the empty one and a seeded choice.
        precision: "float64" computes everything in float64 on both sides, where bounds are so small
            that no mistake hides below them; "own" in the types of the graph, against float64.
        variables: Name -> value at the start.  Default: by their initializers.
        warm_steps: Steps that one rank takes first, so that no bias and no slot is still 0.
        storage: As of `mm.compile`.
        kernels: "numpy", or "native" for generated C.
        seed: Of variables, random numbers, feeds and sample.

    Returns:
        A `Report`: ``.ok``, ``print(report)``, ``.wrong[0].first.source``.

    Raises:
        ConfigError, FeedError: Before anything runs.
    """
    if precision not in PRECISIONS or ranks not in ("simulated", "mpi"):
        raise ConfigError(
            f"verify(precision={precision!r}, ranks={ranks!r}) is not known.",
            "precision is 'float64' or 'own', ranks is 'simulated' or 'mpi'.",
        )
    named = named_fetches(graph, fetches)
    chosen = list(graph.updates if updates is None else updates)
    given = random_feeds(graph, seed) if feeds is None else dict(feeds)
    _check_memory(graph, named, chosen)
    truth = Truth(graph, named, chosen, given, variables, warm_steps, precision, seed)
    report = Report([], precision)
    shapes = [mesh] if isinstance(mesh, (str, MeshShape)) else list(mesh)
    for shape in map(MeshShape, shapes):
        tried: Iterable[LayoutLike] = layouts
        if isinstance(layouts, str) and layouts == "all":
            found = legal_layouts(graph, shape, sample, seed)
            tried = found.legal
            report.skipped.append(f"{found}.")
        elif isinstance(layouts, str):
            tried = [layouts]
        for layout in tried:
            runner = _Runner(truth, shape, Layout(layout), Layout(storage), ranks, kernels)
            report.checks.append(runner.check())
    return report


def _check_memory(graph: Graph, fetches: Mapping[str, Tensor], updates: Sequence[Update]) -> None:
    """Refuses a graph whose tensors and bounds do not fit into half of this machine."""
    tensors = needed_tensors(graph, [*fetches.values(), *(u.value for u in updates)])
    needed = 16 * sum(t.shape.size for t in tensors)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there / 2:
        raise ConfigError(
            f"all {len(tensors)} tensors of the graph with their bounds take {needed / 2**30:.1f}"
            f" GB, this machine has {there / 2**30:.1f} GB.",
            "Verify the same model with smaller dimensions: layouts do not depend on sizes.",
        )


class Truth:
    """What one rank computes, with bounds: the reference of every layout.

    Attributes:
        values: Tensor -> whole array.
        bounds: Tensor -> largest difference of each element by rounding, or None for none.
        after: Variable -> the tensor that it becomes.
        start: Variable -> whole array at the start of the step.
    """

    def __init__(
        self, graph: Graph, fetches: Mapping[str, Tensor], updates: Sequence[Update],
        feeds: Mapping[str, Any], variables: Mapping[str, Any] | None, warm_steps: int,
        precision: str, seed: int,
    ):  # fmt: skip
        self.graph, self.fetches, self.updates = graph, fetches, updates
        self.feeds, self.precision, self.seed, self.step = feeds, precision, seed, warm_steps
        own = reference(graph, fetches, updates, seed, False)
        self.start = initial_variables(own.program, variables, seed)
        for step in range(warm_steps):
            news = interpret(
                graph, feeds, fetches, updates=updates, variables=self.start, seed=seed, step=step
            )
            self.start.update({u.variable.name: news[u.variable.name] for u in updates})
        wide = reference(graph, fetches, updates, seed, True)
        self._run(wide, own.program)

    def _run(self, ref: Reference, own: Program) -> None:
        narrow = own.types if self.precision == "own" else {}
        dtypes = {v: narrow.get(v, t).dtype for v, t in ref.program.types.items()}
        tracker = Bounds(ref.program, dtypes)
        self.values: dict[Tensor, np.ndarray] = {}
        self.bounds: dict[Tensor, np.ndarray | None] = {}
        value_of = {t: v for v, ts in ref.made.items() for t in ts}
        # In float64 the reference is rounded as well, so that two errors may add up.
        twice = 1 if self.precision == "own" else 2
        with np.errstate(all="ignore"):
            for c in run(ref, self.feeds, self.start, self.seed, self.step, tracker.observe):
                self.values[c.tensor] = c.value
                e = tracker.errors[value_of[c.tensor]]
                self.bounds[c.tensor] = None if e is None else twice * e
        self.after = {u.variable.name: u.value for u in self.updates}


class _Runner:
    """One layout on one mesh."""

    def __init__(
        self, truth: Truth, shape: MeshShape, layout: Layout, storage: Layout, ranks: str,
        kernels: str,
    ):  # fmt: skip
        self.truth, self.shape, self.layout, self.storage = truth, shape, layout, storage
        self.kernels = kernels
        self.mesh: Any = SimulatedMesh(shape) if ranks == "simulated" else _real_mesh(shape)
        self.check_ = Check(str(shape), str(layout))

    def check(self) -> Check:
        """Lowered, then optimised; stops at what is wrong."""
        t, out = self.truth, self.check_
        try:
            program, values = lowered_with_values(
                t.graph, self.shape, self.layout, t.fetches, t.updates, self.storage, t.seed
            )
        except LayoutError as e:
            out.refused = e.problem
            return out
        except FAILURES as e:
            return self._failed("lowering", e)
        made = by_value(values)
        out.stage = "lowering"
        if not self._agrees(program, made):
            return out
        return self._check_passes(program, made)

    def _check_passes(self, program: Program, made: Mapping[int, list[Tensor]]) -> Check:
        """Runs what the passes leave; where that is wrong, finds the first pass that is."""
        stages, passes = [program], pipeline.PASSES
        for one in passes:
            try:
                stages.append(one(stages[-1]))
                check_types(stages[-1])
            except FAILURES as e:
                return self._failed(_name(one), e)
        self.check_.stage = ""
        if self._agrees(stages[-1], made):
            return self.check_
        for one, after in zip(passes, stages[1:], strict=True):
            self.check_.first, self.check_.error, self.check_.instruction = None, "", ""
            self.check_.stage = _name(one)
            if not self._agrees(after, made):
                break
        return self.check_

    def _failed(self, stage: str, e: Exception) -> Check:
        self.check_.stage = stage
        self.check_.error = f"{type(e).__name__}: {e}"
        return self.check_

    def _agrees(self, program: Program, made: Mapping[int, list[Tensor]]) -> bool:
        """Runs a program and compares all that it shows of the graph's tensors."""
        t, out = self.truth, self.check_
        program = widened(program) if t.precision == "float64" else program
        found: dict[str, Difference] = {}
        by: dict[str, Instruction] = {}

        def observe(i: Instruction, v: int, blocks: Blocks) -> None:
            for tensor in made.get(v, ()):
                if program.types[v].shape == tensor.shape:
                    found[tensor.name] = self._compare(tensor, program.types[v], blocks)
                    by[tensor.name] = i

        try:
            fetched, left = run_observed(
                program, self.mesh, t.feeds, t.start, t.step, self.kernels, observe
            )
        except FAILURES as e:
            self._failed(out.stage or "running", e)
            return False
        for name, blocks in fetched.items():
            d = self._compare(t.fetches[name], program.types[program.fetches[name]], blocks)
            found[d.tensor] = _worse(found.get(d.tensor), d)
        for name, tensor in t.after.items():
            d = self._compare(tensor, program.variables[name].type, left[name], name)
            found[f"variable {name}"] = d
        self._take(program, found, by)
        return out.first is None

    def _take(
        self, program: Program, found: Mapping[str, Difference], by: Mapping[str, Instruction]
    ) -> None:
        """Keeps the worst of each tensor and the first wrong one in the order of the graph."""
        order = [*(t.name for t in self.truth.values), *(n for n in found if " " in n)]
        for name in dict.fromkeys(order):
            if name not in found:
                continue
            d = self._agreed(found[name])
            old = self.check_.differences.get(name)
            self.check_.differences[name] = _worse(old, d)
            if not d.ok and self.check_.first is None:
                self.check_.first = d
                if name in by:
                    self.check_.instruction = _as_text(program, by[name])

    def _agreed(self, d: Difference) -> Difference:
        """The worst of all ranks of a job, the same on each."""
        if not hasattr(self.mesh, "comm"):
            return d
        return max(self.mesh.comm.allgather(d), key=lambda one: one.ratio)

    def _compare(
        self, tensor: Tensor, t: LocalType, blocks: Blocks, variable: str = ""
    ) -> Difference:
        """Every rank's block against the same block of the reference."""
        want, bound = self.truth.values[tensor], self.truth.bounds[tensor]
        order = [tensor.shape.position(n) for n in t.shape.names]
        want = want.transpose(order)
        bound = np.zeros(want.shape) if bound is None else bound.transpose(order)
        name, source = tensor.name, tensor.source
        if variable:
            name = f"variable {variable}"
            source = Source(name, *source[1:])
        worst = Difference(name, source, 0.0, float(bound.max(initial=0.0)), 0.0)
        apart, wrong, elements, undecided = 0.0, 0, 0, 0
        for rank, block in blocks.items():
            coordinates = self.shape.coordinates(rank)
            here = tuple(slice(a, b) for a, b in t.block(self.shape, coordinates))
            part = _Part(block, want[here], bound[here])
            wrong, elements = wrong + part.wrong, elements + block.size
            undecided += part.undecided
            apart = max(apart, part.apart)
            if part.ratio > worst.ratio:
                starts = [s.start for s in here]
                worst = Difference(name, source, 0.0, part.at_bound, part.ratio,
                                   where=part.where(t, starts, rank))  # fmt: skip
        return Difference(
            name, source, apart, worst.bound, worst.ratio, wrong, elements, undecided, worst.where
        )


class _Part:
    """The comparison of one block."""

    def __init__(self, got: np.ndarray, want: np.ndarray, bound: np.ndarray):
        self.got, self.want = got, want
        if got.shape != want.shape:
            raise ValueError(f"a block of shape {got.shape} where {want.shape} belongs")
        d = distance(got, want)
        known = np.isfinite(bound)
        self.undecided = int((~known).sum())
        self.apart = float(np.max(d, initial=0.0, where=known))
        self.wrong = int((known & (d > bound)).sum())
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ratio = np.where(d == 0.0, 0.0, d / bound)
        ratio = np.where(known, ratio, 0.0)
        self.ratio, self.at_bound, self._at = 0.0, 0.0, ()
        if ratio.size:
            self._at = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
            self.ratio, self.at_bound = float(ratio[self._at]), float(bound[self._at])

    def where(self, t: LocalType, starts: Sequence[int], rank: int) -> str:
        """The element nearest to, or farthest beyond, its bound."""
        index = ", ".join(
            f"{n}={int(k) + s}" for n, k, s in zip(t.shape.names, self._at, starts, strict=True)
        )
        got, want = (a[self._at].item() for a in (self.got, self.want))
        return f"[{index}] on rank {rank}: {got!r}, one rank has {want!r}"


def _worse(a: Difference | None, b: Difference) -> Difference:
    return b if a is None or b.ratio >= a.ratio else a


def _name(one: Any) -> str:
    return getattr(one, "__name__", str(one)).strip("_")


def _as_text(program: Program, i: Instruction) -> str:
    outs = ", ".join(str(program.types[v]) for v in i.outputs)
    ins = ", ".join(str(program.types[v]) for v in i.inputs)
    axes = f" over {'+'.join(i.attrs['axes'])}" if "axes" in i.attrs else ""
    return f"{i.kind}{axes}: {ins} -> {outs}"


def _real_mesh(shape: MeshShape) -> Any:
    from meshmpi.runtime.mesh import Mesh, size_error
    from meshmpi.runtime.world import world_size

    if world_size() != shape.size:
        raise size_error(shape, world_size())
    return Mesh(shape)
