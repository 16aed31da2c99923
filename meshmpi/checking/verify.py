"""verify(): checks that every layout computes what one rank does, or names the operation that does not.

A layout runs as lowered and after the passes, with NumPy's kernels and with generated ones. One rank recomputes every
operation from the inputs that the layout produced (`interpret`), with an error bound for every value (`bounds`).
Every rank's block is compared with the result, so replicas that differ are found as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Union

import numpy as np

from meshmpi.checking.bounds import EXACT, ROUNDOFF, SPARE, Bounds
from meshmpi.checking.compare import Shown, compared
from meshmpi.checking.feeds import random_feeds
from meshmpi.checking.interpret import (
    initial_variables,
    interpret,
    lowered_with_values,
    needed_tensors,
    of_one_rank,
    run,
    widened,
)
from meshmpi.checking.layouts import legal_layouts
from meshmpi.checking.observe import Blocks, Kernels, run_observed
from meshmpi.checking.report import Check, Report
from meshmpi.compiler.passes import pipeline
from meshmpi.dims import Layout, LayoutLike, MeshShape
from meshmpi.errors import ConfigError, LayoutError, MeshmpiError, suggest
from meshmpi.graph import Graph, Tensor, Update
from meshmpi.graph.arguments import checked
from meshmpi.graph.fetches import named_fetches
from meshmpi.ir.kinds import Redistribution, Shift, Wait
from meshmpi.ir.program import Instruction, LocalType, Program, Violation
from meshmpi.ir.verify import verify as check_types
from meshmpi.kernels.native import CompilerError, NativeKernels
from meshmpi.runtime.agreement import gathered
from meshmpi.runtime.arrays import gather_whole
from meshmpi.runtime.executor import KERNELS, built_on_all
from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.runtime.simulated_mesh import SimulatedMesh

PRECISIONS = ("float64", "own")
Meshes = Union[str, MeshShape, Sequence[Union[str, MeshShape]]]
FAILURES = (MeshmpiError, Violation, ValueError, LookupError, AssertionError)
"""How a broken program shows when it is lowered, rewritten or run."""


@checked
def verify(
    graph: Graph,
    layouts: str | Sequence[LayoutLike] = "all",
    mesh: Meshes = "rows:2;cols:2",
    fetches: Sequence[Tensor] | Mapping[str, Tensor] | None = None,
    updates: Sequence[Update] | None = None,
    feeds: Mapping[str, Any] | None = None,
    *,
    ranks: str = "simulated",
    sample: int | None = None,
    precision: str = "float64",
    variables: Mapping[str, Any] | None = None,
    warm_steps: int = 1,
    storage: LayoutLike = None,
    kernels: str = "auto",
    seed: int = 0,
) -> Report:
    """Runs a graph in many layouts and compares every tensor with what one rank computes.

    One rank computes every operation again, from what the layout made of its inputs.  Both must agree
    up to rounding: for a sum of n terms, to first order (n + 5) u sum |terms|, u the unit roundoff (see
    `meshmpi.checking.bounds`).  No bound is tuned or grows with depth: a larger difference is a mistake or an overflow.

    Args:
        graph: With gradients and updates; every tensor is kept whole in float64, with its bound.
        layouts: "all" legal ones, or those to try; a named layout that is illegal counts as wrong.
        mesh: One mesh shape or several.
        fetches, updates: Default: as for `mm.plan`.
        feeds, variables: Name -> array; default: random numbers, and values by the initializers.
        ranks: "simulated", or "mpi": collective, in a job of as many ranks as the mesh has.
        sample: Maximum number of layouts for each mesh: the empty one and a seeded choice.
        precision: "float64" on both sides, or "own": the types of the graph, against float64.
        warm_steps: Steps that one rank takes first, so that no bias and no slot is still 0.
        kernels: "numpy"; "native": generated C kernels run too; "auto": if there is a C compiler.
        storage, seed: As for `mm.compile`; the seed is also that of feeds and sample.

    Returns:
        A `Report`: ``.ok``, ``print(report)``, ``.wrong[0].first.source``; not ok if nothing was tried.

    Raises:
        ConfigError, FeedError: Before anything runs.
    """
    how = Asked(ranks, sample, precision, variables, warm_steps, storage, kernels, seed)
    return verified(graph, layouts, mesh, fetches, updates, feeds, how)


class Asked(NamedTuple):
    """How to verify, see `verify`."""

    ranks: str = "simulated"
    sample: int | None = None
    precision: str = "float64"
    variables: Mapping[str, Any] | None = None
    warm_steps: int = 1
    storage: LayoutLike = None
    kernels: str = "auto"
    seed: int = 0


def verified(
    graph: Graph,
    layouts: str | Sequence[LayoutLike],
    mesh: Meshes,
    fetches: Sequence[Tensor] | Mapping[str, Tensor] | None,
    updates: Sequence[Update] | None,
    feeds: Mapping[str, Any] | None,
    how: Asked,
    looked: Callable[[int, int, str], object] = lambda *_: None,
) -> Report:
    """As `verify`; ``looked`` is called before each layout with (layouts done, layouts to try, the layout)."""
    ranks, sample, precision, variables, warm_steps, storage, kernels, seed = how
    _check_options(precision, ranks, sample, seed, kernels)
    named = named_fetches(graph, fetches)
    chosen = list(graph.updates if updates is None else updates)
    given = random_feeds(graph, seed) if feeds is None else dict(feeds)
    _check_memory(graph, named, chosen)
    truth = Truth(graph, named, chosen, given, variables, warm_steps, precision, seed)
    report = Report([], precision)
    for shape in map(MeshShape, [mesh] if isinstance(mesh, (str, MeshShape)) else list(mesh)):
        tried = _tried(graph, layouts, shape, sample, seed, report)
        where = SimulatedMesh(shape) if ranks == "simulated" else _real_mesh(shape)
        runners = [_Runner(truth, where, Layout(one), Layout(storage)) for one in tried]
        native = None if kernels == "numpy" else _built(where, runners, kernels, report)
        for done, runner in enumerate(runners):
            runner.check_.named = layouts != "all"
            looked(done, len(runners), f"'{runner.check_.layout}' on {shape}")
            report.checks.append(runner.check(native))
    return report


def _built(mesh: AnyMesh, runners: Sequence[_Runner], kernels: str, report: Report) -> NativeKernels | None:
    """The generated kernels of all layouts, built together; None where none can be had."""
    programs = [r.final for r in runners if r.final is not None]
    here = range(mesh.shape.size) if mesh.simulated else [mesh.rank]
    try:
        native = built_on_all(mesh, programs, [mesh.shape.coordinates(r) for r in here])
    except CompilerError as e:
        if kernels == "native":
            raise ConfigError(
                f"kernels='native' needs a C compiler that works on every rank; {e}",
                "Or use kernels='auto', which verifies NumPy's kernels where there is none.",
            ) from None
        report.skipped.append(f"Generated kernels were not run: {e}")
        return None
    report.native = True
    if native.refused:
        words = next(iter(native.refused.values()))
        report.skipped.append(f"{len(native.refused)} kernels were not built: {words}")
    return native


def _check_options(precision: str, ranks: str, sample: int | None, seed: int, kernels: str) -> None:
    if precision not in PRECISIONS or ranks not in ("simulated", "mpi"):
        raise ConfigError(
            f"verify(precision={precision!r}, ranks={ranks!r}) is not known.",
            "precision is 'float64' or 'own', ranks is 'simulated' or 'mpi'.",
        )
    if kernels not in KERNELS:
        raise ConfigError(f"there are no kernels '{kernels}'.", suggest(kernels, KERNELS))
    if seed < 0:
        raise ConfigError(f"the seed is {seed}.", "Give a number of at least 0.")
    if sample is not None and sample < 1:
        raise ConfigError(f"a sample of {sample} layouts verifies nothing.", "Ask for at least 1, or for all.")


def _tried(
    graph: Graph, layouts: str | Sequence[LayoutLike], shape: MeshShape, sample: int | None, seed: int, report: Report
) -> Iterable[LayoutLike]:
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
    """A tensor of the graph as a layout computed it."""

    whole: np.ndarray
    error: np.ndarray  # of finishing a sum that the program leaves pending


class Truth:
    """What one rank computes, from the start (``values``: tensor -> array) or from what a layout has computed."""

    def __init__(
        self,
        graph: Graph,
        fetches: Mapping[str, Tensor],
        updates: Sequence[Update],
        feeds: Mapping[str, Any],
        variables: Mapping[str, Any] | None,
        warm_steps: int,
        precision: str,
        seed: int,
    ):
        self.graph, self.fetches, self.updates = graph, fetches, updates
        self.feeds, self.precision, self.seed, self.step = feeds, precision, seed, warm_steps
        own, self._value_of = of_one_rank(graph, fetches, updates, seed)
        self.start = initial_variables(own, variables)
        for step in range(warm_steps):
            news = interpret(graph, feeds, fetches, updates=updates, variables=self.start, seed=seed, step=step)
            self.start.update({u.variable.name: news[u.variable.name] for u in updates})
        self._wide = widened(own)
        narrow = own.types if precision == "own" else {}
        self._dtypes = {v: narrow.get(v, t).dtype for v, t in self._wide.types.items()}
        self.values = {t: value for t, value, _ in self.judged({})}

    def judged(self, seen: Mapping[Tensor, Seen]) -> Iterator[tuple[Tensor, np.ndarray, np.ndarray]]:
        """Tensor, what it must be, and by how much each element may differ, in the order of the graph.

        Every operation is computed from what the layout has made of its inputs, where that is ``seen``: bounds are
        those of this one operation, and one mistake does not make all that follows wrong.
        """
        bounds, value_of = Bounds(self._wide, self._dtypes), self._value_of
        # In float64 the reference is rounded as well, so that two errors may add up.
        twice = 1 if self.precision == "own" else 2
        instead = {
            t: s.whole.astype(np.float64) if s.whole.dtype.kind not in "iub" else s.whole for t, s in seen.items()
        }
        with np.errstate(all="ignore"):
            for c in run(self._wide, value_of, self.feeds, self.start, self.step, bounds.observe, instead):
                yield c.tensor, c.value, twice * bounds.errors[value_of[c.tensor]]
                if c.tensor in seen:
                    bounds.errors[value_of[c.tensor]] = seen[c.tensor].error


class _Runner:
    """One layout on one mesh."""

    def __init__(self, truth: Truth, mesh: AnyMesh, layout: Layout, storage: Layout):
        self.truth, self.mesh, self.shape = truth, mesh, mesh.shape
        self.check_ = Check(str(mesh.shape), str(layout))
        self.stages: list[tuple[str, Program]] = []  # "lowering" or a pass, and the program after it
        self.made: dict[int, list[Tensor]] = {}
        self._broken: tuple[str, Exception] | None = None
        self._lower(layout, storage)
        self.final = self._as_run(self.stages[-1][1]) if self.stages and not self._broken else None

    def _lower(self, layout: Layout, storage: Layout) -> None:
        t, out = self.truth, self.check_
        try:
            program, values = lowered_with_values(t.graph, self.shape, layout, t.fetches, t.updates, storage, t.seed)
        except LayoutError as e:
            out.refused, out.remedy = e.problem, e.remedy
            return
        except FAILURES as e:
            self._failed("lowering", e)
            return
        for tensor, v in values.items():
            self.made.setdefault(v, []).append(tensor)
        self.stages.append(("lowering", program))
        for one in pipeline.PASSES:
            name = getattr(one, "__name__", str(one)).strip("_")
            try:
                program = one(program)
                check_types(program)
            except FAILURES as e:
                self._broken = name, e
                return
            self.stages.append((name, program))

    def check(self, native: NativeKernels | None) -> Check:
        """As lowered, then as the passes leave it, by NumPy's kernels and the ones given; stops at a mistake."""
        out = self.check_
        if not self.stages:
            return out
        out.stage = "lowering"
        if not self._agrees(self._as_run(self.stages[0][1]), "numpy"):
            return out
        if self._broken is not None:
            return self._failed(*self._broken)
        out.stage = ""
        assert self.final is not None
        if not self._agrees(self.final, "numpy"):
            self._find_stage("numpy")
        elif native is not None and not self._agrees(self.final, native):
            out.native = True
            self._find_stage("native")
        return out

    def _find_stage(self, kernels: str) -> None:
        """Runs the stages until one is wrong, and says which."""
        for name, program in self.stages:
            self.check_.first, self.check_.error, self.check_.instruction = None, "", ""
            self.check_.stage = name
            if not self._agrees(self._as_run(program), kernels):
                break

    def _as_run(self, program: Program) -> Program:
        return widened(program) if self.truth.precision == "float64" else program

    def _failed(self, stage: str, e: Exception) -> Check:
        self.check_.stage, self.check_.error = stage, f"{type(e).__name__}: {e}"
        return self.check_

    def _agrees(self, program: Program, kernels: Kernels) -> bool:
        """Runs a program and compares all that it shows of the graph's tensors."""
        t, out, made = self.truth, self.check_, self.made
        shown: dict[Tensor, list[Shown]] = {}
        seen: dict[Tensor, Seen] = {}

        def observe(i: Instruction, v: int, blocks: Blocks, sizes: Blocks | None) -> None:
            own = program.types[v]
            for tensor in made.get(v, ()):
                if own.shape == tensor.shape:
                    kept = {r: b.copy() for r, b in blocks.items()}
                    seen[tensor] = self._whole(own, kept, sizes)
                    shown.setdefault(tensor, []).append(Shown(tensor.name, own, kept, i))

        try:
            fetched, left = run_observed(program, self.mesh, t.feeds, t.start, t.step, kernels, observe)
        except FAILURES as e:
            self._failed(out.stage or "running", e)
            return False
        for name, blocks in fetched.items():
            kind = program.types[program.fetches[name]]
            shown.setdefault(t.fetches[name], []).append(Shown(t.fetches[name].name, kind, blocks))
        for u in t.updates:
            name = u.variable.name
            shown.setdefault(u.value, []).append(Shown(f"variable {name}", program.variables[name].type, left[name]))
        self._judge(program, shown, seen)
        return out.first is None

    def _whole(self, t: LocalType, blocks: Blocks, sizes: Blocks | None) -> Seen:
        finished = t.finished()
        whole = gather_whole(self.mesh, finished, blocks)
        if sizes is None:
            return Seen(whole, EXACT)
        terms = gather_whole(self.mesh, finished, sizes).astype(np.float64)
        roundings = self.shape.count(t.partial) + SPARE
        return Seen(whole, roundings * ROUNDOFF.get(t.dtype, 0.0) * terms)

    def _judge(self, program: Program, shown: Mapping[Tensor, list[Shown]], seen: Mapping[Tensor, Seen]) -> None:
        """Keeps the worst of each tensor and the first wrong one in the order of the graph."""
        for tensor, want, bound in self.truth.judged(seen):
            if tensor in seen:
                bound = bound + seen[tensor].error
            for one in shown.get(tensor, ()):
                mine = compared(tensor, one, want, bound, self.truth.values[tensor], self.shape)
                d = max(gathered(self.mesh, mine, "verify"), key=lambda one: one.ratio)  # the same on each rank
                old = self.check_.differences.get(d.tensor)
                self.check_.differences[d.tensor] = old if old is not None and old.ratio > d.ratio else d
                if not d.ok and self.check_.first is None:
                    self.check_.first = d
                    self.check_.instruction = "" if one.made_by is None else _as_text(program, one.made_by)


def _as_text(program: Program, i: Instruction) -> str:
    outs = ", ".join(str(program.types[v]) for v in i.outputs)
    ins = ", ".join(str(program.types[v]) for v in i.inputs)
    axes = f" over {'+'.join(i.attrs.axes)}" if isinstance(i.attrs, (Redistribution, Shift, Wait)) else ""
    return f"{i.kind}{axes}: {ins} -> {outs}"


def _real_mesh(shape: MeshShape) -> Any:
    from meshmpi.runtime.mesh import Mesh, size_error
    from meshmpi.runtime.world import world_size

    if world_size() != shape.size:
        raise size_error(shape, world_size())
    return Mesh(shape)
