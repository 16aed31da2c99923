"""Instructions of every kind on small random blocks, and how they are run on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from meshmpi.checking.evaluate import evaluate
from meshmpi.dims import MeshShape, Shape
from meshmpi.ir.bands import Band
from meshmpi.ir.convolutions import ConvDims
from meshmpi.ir.kinds import (
    AllGather,
    AllReduce,
    AllToAll,
    BlockSum,
    Concat,
    Contract,
    Conv,
    Cumsum,
    Feed,
    Fused,
    Gather,
    Iota,
    LocalFunction,
    LocalSlice,
    Map,
    Pad,
    Put,
    Random,
    Read,
    Reduce,
    ReduceScatter,
    ScatterAdd,
    Shift,
    Slice,
    StepNumber,
    Tiled,
    TileDim,
    TopK,
    Transpose,
    View,
    Wait,
    Write,
)
from meshmpi.ir.kinds.functions import ArrayType, Function
from meshmpi.ir.program import Instruction, Kind, LocalType, Program, VariableType
from meshmpi.ir.scalar import call
from meshmpi.kernels import numpy_dtype
from meshmpi.runtime.executor import Executor
from meshmpi.runtime.simulated_mesh import SimulatedMesh
from meshmpi.runtime.variables import VariableStore

MESH = MeshShape("rows:2;cols:3")
RANKS = [MESH.coordinates(r) for r in range(MESH.size)]
Blocks = list[list[np.ndarray]]
"""For each rank the blocks of all values."""


def held(dims: str, dtype: str = "float64", pending: str = "") -> LocalType:
    """``held("a:4/rows b:6")``: dims with their sizes and axes; ``pending``: axes of a sum."""
    names, sizes, axes = [], [], []
    for dim in dims.split():
        dim, _, split = dim.partition("/")
        name, _, size = dim.partition(":")
        names.append(name)
        sizes.append(int(size))
        axes.append(tuple(split.split("+")) if split else ())
    shape = Shape(list(zip(names, sizes, strict=True)))
    return LocalType(shape, dtype, tuple(axes), tuple(pending.split("+")) if pending else ())


def cut(whole: np.ndarray, t: LocalType, at: Mapping[str, int]) -> np.ndarray:
    """The block of an array at ``at``; what a halo region holds beyond the ends is 0."""
    for axis, (start, stop) in enumerate(t.block(MESH, at)):
        place = np.arange(start, stop)
        inside = (place >= 0) & (place < whole.shape[axis])
        taken = np.take(whole, place, axis, mode="clip")
        whole = taken * inside.reshape([-1 if k == axis else 1 for k in range(whole.ndim)]).astype(whole.dtype)
    return whole


@dataclass(frozen=True, eq=False)
class Sample:
    """An instruction with the types of its values.

    Attributes:
        start: An instruction that comes before, on the same inputs (of a `wait`).
        by_blocks: What it means depends on how its dim is split.
    """

    attrs: Kind
    ins: Sequence[LocalType]
    outs: Sequence[LocalType]
    start: Kind | None = None
    by_blocks: bool = False

    @property
    def reads(self) -> tuple[int, ...]:
        return tuple(range(len(self.ins)))

    @property
    def makes(self) -> tuple[int, ...]:
        return tuple(range(100, 100 + len(self.outs)))

    @property
    def instruction(self) -> Instruction:
        reads = self.reads if self.start is None else (99,)
        return Instruction(self.attrs, reads, self.makes)

    @cached_property
    def program(self) -> Program:
        """Feeds, and the instruction; unfinished sums are fed too."""
        types = dict(zip(self.reads, self.ins, strict=True))
        feeds = {f"in{k}": t for k, t in enumerate(self.ins)}
        body = [Instruction(Feed(f"in{k}"), (), (k,)) for k in self.reads]
        variables = {}
        if isinstance(self.attrs, Feed):
            feeds[self.attrs.name] = self.outs[0]
        if isinstance(self.attrs, (Read, Write)):
            stored = (*self.ins, *self.outs)[0]
            variables["v"] = VariableType("v", stored, np.zeros(stored.shape.sizes))
        if self.start is not None:
            types[99] = self.outs[0]
            body.append(Instruction(self.start, self.reads, (99,)))
        types.update(zip(self.makes, self.outs, strict=True))
        return Program(MESH, types, (*body, self.instruction), variables, feeds, {}, 7)

    def whole(self, seed: int = 0) -> list[list[np.ndarray]]:
        """For each rank whole arrays of whole numbers; ranks differ where a sum is pending."""
        dim = getattr(self.attrs, "dim", None)
        rows = [t.shape.dim(dim).size for t in (*self.ins, *self.outs) if dim and t.shape.find(dim) >= 0]

        def array(k: int, at: Mapping[str, int]) -> np.ndarray:
            t = self.ins[k]
            rng = np.random.default_rng([seed, k, *(at[a] for a in t.partial)])
            if t.dtype == "int32":
                return rng.integers(0, rows[0], t.shape.sizes).astype(np.int32)
            return (rng.integers(1, 5, t.shape.sizes) * rng.choice([-1.0, 1.0], t.shape.sizes)).astype(
                numpy_dtype(t.dtype)
            )

        return [[array(k, at) for k in self.reads] for at in RANKS]

    def blocks(self, whole: list[list[np.ndarray]]) -> Blocks:
        cuts = zip(whole, RANKS, strict=True)
        return [[cut(x, t, at) for x, t in zip(xs, self.ins, strict=True)] for xs, at in cuts]

    def on_one_rank(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The results for whole inputs, where nothing is pending or held with halos."""
        types = {v: replace(t, halos=()) for v, t in self.program.types.items()}
        program = replace(self.program, mesh=MeshShape("rows:1;cols:1"), types=types)
        return list(inputs) if self.start is not None else evaluate(self.instruction, program, inputs)

    @cached_property
    def executor(self) -> Executor:
        return executor(self.program)

    def run(self, blocks: Blocks) -> Blocks:
        """The results on every rank."""
        return run(self.executor, blocks, self.makes)


def executor(program: Program) -> Executor:
    mesh = SimulatedMesh(program.mesh)
    store = VariableStore(mesh, list(range(MESH.size)))
    for variable in program.variables.values():
        store.add(variable, 0)
    return Executor(program, mesh, store, kernels="numpy")


def run(executor: Executor, blocks: Blocks, wanted: Sequence[int]) -> Blocks:
    for state, xs in zip(executor.states, blocks, strict=True):
        for k, x in enumerate(xs):
            state.feeds[f"in{k}"][...] = x
    executor.run()
    return [[state.arrays[v].copy() for v in wanted] for state in executor.states]


def _fused() -> Kind:
    body = (Instruction(Map(call("square", 1, "float64")), (0,), (50,)), Instruction(Reduce("sum"), (50,), (100,)))
    return Fused(Shape("a:4"), body, {50: held("a:4/rows b:6")})


def _function(call: Callable[..., Any], takes: str, makes: str) -> Kind:
    """Of arrays with dims "ab c"; indices along a are independent."""
    ins, outs = (tuple(ArrayType(tuple(names), "float64") for names in text.split()) for text in (takes, makes))
    return LocalFunction(Function("f", call, ins, outs, 1), ("a",))


def _tiled(band: Band | None = None) -> Kind:
    body = (Instruction(Map(call("negative", 1, "float64")), (0,), (50,)), Instruction(Contract(band), (50, 1), (100,)))
    return Tiled((TileDim("a", 2),), band, body, {50: held("a:8/rows k:6")})


def _halo(t: LocalType, dims: ConvDims, of: int, taps: int) -> LocalType:
    return replace(t, halos=tuple(dims.halo(of, taps) if n == dims.x else None for n in t.shape.names))


def _map(function: str, ins: Sequence[str], out: str, **more: Any) -> Sample:
    return Sample(Map(call(function, len(ins), "float64")), [held(x, **more) for x in ins], [held(out, **more)])


_DIMS, _BAND = ConvDims("x", "w", "y", before=1), Band("a", "k", 0, None)
_X, _INDEX = held("r:5 c:3/rows"), held("n:4", "int32")
_SHIFT = {"dim": "a", "axes": ("rows",), "stride": 1, "value": 0.0}
SAMPLES = [
    Sample(Feed("x"), [], [held("a:4/rows b:6")]),
    Sample(Read("v"), [], [held("a:4/rows b:6")]),
    Sample(Write("v"), [held("a:4/rows b:6")], []),
    Sample(StepNumber(), [], [held("", "int32")]),
    Sample(Iota("a"), [], [held("a:7/cols", "int32")]),
    Sample(Random("uniform", "k"), [], [held("a:4/rows b:6", "float32")]),
    Sample(Random("normal", "k"), [], [held("a:5/cols b:6", "float32")]),
    _map("add", ["a:4/rows b:6", "a:4/rows b:6"], "a:4/rows b:6"),
    _map("multiply", ["a:5/rows b:6", "b:6"], "a:5/rows b:6"),
    _map("divide", ["a:4 b:6/cols", "a:4"], "a:4 b:6/cols"),
    _map("negative", ["a:4 b:6"], "a:4 b:6", pending="rows"),
    _map("maximum", ["a:4 b:6", "b:6"], "a:4 b:6"),
    Sample(Reduce("sum"), [held("a:4/rows b:6")], [held("a:4/rows")]),
    Sample(Reduce("sum"), [held("a:5/rows b:6/cols")], [held("b:6/cols", pending="rows")]),
    Sample(Reduce("max"), [held("a:4/rows b:6")], [held("a:4/rows")]),
    Sample(Reduce("sum", Band("a", "b", None, 1)), [held("a:4/rows b:6")], [held("a:4/rows")]),
    Sample(Contract(), [held("a:4/rows k:6/cols"), held("k:6/cols b:5")], [held("a:4/rows b:5", pending="cols")]),
    Sample(Contract(), [held("a:4/rows b:5"), held("a:4/rows")], [held("a:4/rows b:5")]),
    Sample(Contract(_BAND), [held("a:4/rows k:6"), held("k:6 b:5")], [held("a:4/rows b:5")]),
    Sample(Conv((_DIMS,)), [held("x:7 i:2"), held("w:3 i:2 o:3")], [held("y:7/cols o:3")]),
    Sample(Conv((_DIMS,)), [_halo(held("x:8/rows i:2"), _DIMS, 8, 3), held("w:3 i:2 o:3")], [held("y:8/rows o:3")]),
    Sample(Transpose(), [held("a:4/rows b:6")], [held("b:6 a:4/rows")]),
    Sample(View(), [held("a:4/rows b:6")], [held("ab:24/rows")]),
    Sample(Slice("b", 0, 4, 1), [held("b:6 a:4/rows")], [held("b:4 a:4/rows")]),
    Sample(Slice("b", 1, 6, 2), [held("a:4/rows b:6")], [held("a:4/rows b:3")]),
    Sample(Pad("b", 1, 2, 0.0), [held("a:4/rows b:3")], [held("a:4/rows b:6")]),
    Sample(Pad("b", 1, 0, 3.0), [held("a:4/rows b:3")], [held("a:4/rows b:4")]),
    Sample(Concat("b"), [held("a:4/rows b:3"), held("a:4/rows b:2")], [held("a:4/rows b:5")]),
    Sample(Gather("r"), [_X, _INDEX], [held("n:4 c:3/rows")]),
    Sample(Gather("r", may_miss=True), [held("r:5/cols c:3"), _INDEX], [held("n:4 c:3", pending="cols")]),
    Sample(ScatterAdd("r"), [held("n:4 c:3/rows"), _INDEX], [_X]),
    Sample(ScatterAdd("r"), [held("n:4/cols c:3"), held("n:4/cols", "int32")], [held("r:5 c:3", pending="cols")]),
    Sample(Put("r"), [_X, held("n:4 c:3/rows"), _INDEX], [_X]),
    Sample(TopK("b", "k"), [held("a:4/rows b:6")], [held("a:4/rows k:2"), held("a:4/rows k:2", "int32")]),
    Sample(
        TopK("b", "k", smallest=True),
        [held("a:4 b:6/rows")],
        [held("a:4 k:4/rows"), held("a:4 k:4/rows", "int32")],
        by_blocks=True,
    ),
    Sample(BlockSum("a", "p"), [held("a:4/rows b:3")], [held("p:2/rows b:3")], by_blocks=True),
    Sample(Cumsum("b", exclusive=False, reverse=False), [held("a:4/rows b:6")], [held("a:4/rows b:6")]),
    Sample(Cumsum("b", exclusive=True, reverse=True), [held("a:4/rows b:6")], [held("a:4/rows b:6")]),
    Sample(_function(lambda x: np.exp(x - x[:, :1]), "ab", "ab"), [held("a:4/rows b:6")], [held("b:6 a:4/rows")]),
    Sample(
        _function(lambda x, w: (np.exp(x) * w[:, None], x[::-1], x @ x.T), "ba b", "ba ba bc"),
        [held("b:3 a:5/cols"), held("b:3")],
        [held("b:3 a:5/cols"), held("b:3 a:5/cols"), held("b:3 c:3", pending="cols")],
    ),
    Sample(_fused(), [held("a:4/rows b:6")], [held("a:4/rows")]),
    Sample(_tiled(), [held("a:8/rows k:6"), held("k:6 b:5")], [held("a:8/rows b:5")]),
    Sample(_tiled(_BAND), [held("a:8/rows k:6"), held("k:6 b:5")], [held("a:8/rows b:5")]),
    Sample(AllReduce(("rows",), "sum"), [held("a:4 b:6", pending="rows")], [held("a:4 b:6")]),
    Sample(AllReduce(("rows",), "sum"), [held("a:4", pending="rows")] * 2, [held("a:4")] * 2),
    Sample(ReduceScatter("a", ("cols",), "sum"), [held("a:7 b:2", pending="cols")], [held("a:7/cols b:2")]),
    Sample(AllGather("b", ("rows",)), [held("a:4 b:5/rows")], [held("a:4 b:5")]),
    Sample(AllToAll("a", "b", ("rows",)), [held("a:4 b:5/rows")], [held("a:4/rows b:5")]),
    Sample(Shift(offsets=(-1,), wrap=True, **_SHIFT), [held("a:6/rows b:2")], [held("a:6/rows b:2")]),
    Sample(
        Shift(offsets=(0,), wrap=False, **{**_SHIFT, "dim": "x"}),
        [held("x:8/rows i:2")],
        [_halo(held("x:8/rows i:2"), _DIMS, 8, 3)],
    ),
    Sample(
        Shift(offsets=(1,), wrap=False, **{**_SHIFT, "axes": ("cols",)}),
        [_halo(held("x:8/rows a:6/cols"), _DIMS, 8, 3)],
        [_halo(held("x:8/rows a:6/cols"), _DIMS, 8, 3)],
    ),
    Sample(Wait(("rows",)), [held("a:4 b:6", pending="rows")], [held("a:4 b:6")], AllReduce(("rows",), "sum", True)),
    Sample(LocalSlice("b", ("cols",)), [held("a:4 b:6", pending="rows")], [held("a:4 b:6/cols", pending="rows")]),
]
