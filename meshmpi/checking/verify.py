"""verify(): every layout computes what one rank does, or which operation does not.

A layout is run twice: as lowered, where every tensor of the graph is a value of the program, and as
the passes leave it.  Then one rank computes every operation again (`interpret`), from what the
layout made of its inputs, with an error bound beside every value (`bounds`).  Each rank's block of
each tensor is compared with that, so that replicas which differ from each other are found as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Union

import numpy as np

from meshmpi.checking.bounds import ROUNDOFF, SPARE, Bounds, added
from meshmpi.checking.compare import Shown, compared, worse
from meshmpi.checking.feeds import random_feeds
from meshmpi.checking.interpret import (
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
from meshmpi.program import Instruction, LocalType, Program
from meshmpi.runtime.agreement import gathered
from meshmpi.runtime.arrays import gather_whole
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

    Every operation is computed once more on one rank, from what the layout made of its inputs, and
    must give what the layout gave, up to rounding in any order of summation: to first order
    (n + 5) u sum |terms| for a sum of n terms, u the unit roundoff (Higham, Accuracy and Stability
    of Numerical Algorithms, section 4.2; `meshmpi.checking.bounds` says all of it).  Where all
    operations pass, the layout computes the same function; no bound grows with depth.  Nothing is
    tuned: a difference beyond a bound is a mistake, or an overflow.

    Args:
        graph: With gradients and updates, of sizes that one process can hold: every tensor is kept
            whole, in float64, with its bound.
        layouts: "all" legal ones, or those to try; one of these that is illegal on a mesh makes the
            report not ok.
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
        A `Report`: ``.ok``, ``print(report)``, ``.wrong[0].first.source``.  It is not ok where no
        layout was tried, or where one was named that is illegal, which is then among ``.wrong``
        and has ``.refused`` and ``.remedy``.

    Raises:
        ConfigError, FeedError: Before anything runs.
    """
    _check_options(precision, ranks, sample)
    named = named_fetches(graph, fetches)
    chosen = list(graph.updates if updates is None else updates)
    given = random_feeds(graph, seed) if feeds is None else dict(feeds)
    _check_memory(graph, named, chosen)
    truth = Truth(graph, named, chosen, given, variables, warm_steps, precision, seed)
    report = Report([], precision)
    shapes = [mesh] if isinstance(mesh, (str, MeshShape)) else list(mesh)
    for shape in map(MeshShape, shapes):
        tried = _tried(graph, layouts, shape, sample, seed, report)
        for layout in tried:
            runner = _Runner(truth, shape, Layout(layout), Layout(storage), ranks, kernels)
            runner.check_.named = layouts != "all"
            report.checks.append(runner.check())
    return report


def _check_options(precision: str, ranks: str, sample: int | None) -> None:
    if precision not in PRECISIONS or ranks not in ("simulated", "mpi"):
        raise ConfigError(
            f"verify(precision={precision!r}, ranks={ranks!r}) is not known.",
            "precision is 'float64' or 'own', ranks is 'simulated' or 'mpi'.",
        )
    if sample is not None and sample < 1:
        raise ConfigError(
            f"a sample of {sample} layouts verifies nothing.", "Ask for at least 1, or for all."
        )


def _tried(
    graph: Graph, layouts: str | Sequence[LayoutLike], shape: MeshShape, sample: int | None,
    seed: int, report: Report,
) -> Iterable[LayoutLike]:  # fmt: skip
    """The layouts to try on one mesh; those left out are noted in the report."""
    if not isinstance(layouts, str):
        return layouts
    if layouts != "all":
        return [layouts]
    found = legal_layouts(graph, shape, sample, seed)
    report.skipped.append(f"{found}.")
    return found.legal


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


class Seen(NamedTuple):
    """A tensor of the graph as a layout computed it.

    Attributes:
        whole: The whole array.
        error: Of finishing a sum that the program leaves pending; None where none is.
    """

    whole: np.ndarray
    error: np.ndarray | None


class Truth:
    """What one rank computes, from the start or from what a layout has computed.

    Attributes:
        values: Tensor -> whole array, by one rank alone.
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
        self.after = {u.variable.name: u.value for u in self.updates}
        self._wide = reference(graph, fetches, updates, seed, True)
        narrow = own.program.types if precision == "own" else {}
        self._dtypes = {v: narrow.get(v, t).dtype for v, t in self._wide.program.types.items()}
        self.values = {t: value for t, value, _ in self.judged({})}

    def judged(
        self, seen: Mapping[Tensor, Seen]
    ) -> Iterator[tuple[Tensor, np.ndarray, np.ndarray | None]]:
        """What each tensor must be, and by how much it may differ, in the order of the graph.

        Every operation is computed from what the layout itself has made of its inputs, where that
        is seen, so that bounds are those of this one operation (and of those before it that the
        program does not show), and one mistake does not make all that follows wrong.

        Args:
            seen: Tensors as the layout computed them.  Without any, bounds grow from operation to
                operation.

        Yields:
            Tensor, whole array, and the bound of each element; None for none.
        """
        bounds = Bounds(self._wide.program, self._dtypes)
        value_of = {t: v for v, ts in self._wide.made.items() for t in ts}
        # In float64 the reference is rounded as well, so that two errors may add up.
        twice = 1 if self.precision == "own" else 2
        instead = {t: s.whole.astype(np.float64) if s.whole.dtype.kind not in "iub" else s.whole
                   for t, s in seen.items()}  # fmt: skip
        with np.errstate(all="ignore"):
            for c in run(
                self._wide, self.feeds, self.start, self.seed, self.step, bounds.observe, instead
            ):
                e = bounds.errors[value_of[c.tensor]]
                yield c.tensor, c.value, None if e is None else twice * e
                if c.tensor in seen:
                    bounds.errors[value_of[c.tensor]] = seen[c.tensor].error


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
            out.refused, out.remedy = e.problem, e.remedy
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
        shown: dict[Tensor, list[Shown]] = {}
        seen: dict[Tensor, Seen] = {}
        by: dict[str, Instruction] = {}

        def observe(i: Instruction, v: int, blocks: Blocks, sizes: Blocks | None) -> None:
            own = program.types[v]
            for tensor in made.get(v, ()):
                if own.shape == tensor.shape:
                    kept = {r: b.copy() for r, b in blocks.items()}
                    seen[tensor] = self._whole(own, kept, sizes)
                    shown.setdefault(tensor, []).append(Shown(tensor.name, own, kept))
                    by[tensor.name] = i

        try:
            fetched, left = run_observed(
                program, self.mesh, t.feeds, t.start, t.step, self.kernels, observe
            )
        except FAILURES as e:
            self._failed(out.stage or "running", e)
            return False
        for name, blocks in fetched.items():
            kind = program.types[program.fetches[name]]
            shown.setdefault(t.fetches[name], []).append(Shown(t.fetches[name].name, kind, blocks))
        for name, tensor in t.after.items():
            kind = program.variables[name].type
            shown.setdefault(tensor, []).append(Shown(f"variable {name}", kind, left[name]))
        self._judge(program, shown, seen, by)
        return out.first is None

    def _whole(self, t: LocalType, blocks: Blocks, sizes: Blocks | None) -> Seen:
        finished = t.finished()
        whole = gather_whole(self.mesh, finished, blocks)
        if sizes is None:
            return Seen(whole, None)
        terms = gather_whole(self.mesh, finished, sizes).astype(np.float64)
        roundings = self.shape.count(t.partial) + SPARE
        return Seen(whole, roundings * ROUNDOFF.get(t.dtype, 0.0) * terms)

    def _judge(
        self, program: Program, shown: Mapping[Tensor, list[Shown]],
        seen: Mapping[Tensor, Seen], by: Mapping[str, Instruction],
    ) -> None:  # fmt: skip
        """Keeps the worst of each tensor and the first wrong one in the order of the graph."""
        for tensor, want, bound in self.truth.judged(seen):
            if tensor in seen:
                bound = added(bound, seen[tensor].error)
            for one in shown.get(tensor, ()):
                alone = self.truth.values[tensor]
                d = self._agreed(compared(tensor, one, want, bound, alone, self.shape))
                old = self.check_.differences.get(d.tensor)
                self.check_.differences[d.tensor] = d if old is None else worse(old, d)
                if not d.ok and self.check_.first is None:
                    self.check_.first = d
                    if d.tensor in by:
                        self.check_.instruction = _as_text(program, by[d.tensor])

    def _agreed(self, d: Difference) -> Difference:
        """The worst of all ranks of a job, the same on each."""
        return max(gathered(self.mesh, d, "verify"), key=lambda one: one.ratio)


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
