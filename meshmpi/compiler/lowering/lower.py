"""graph + layout + mesh shape -> Program, the same on every rank; no arrays, no MPI, no rank.

Deliberately simple: every sum is completed where it arises, and every value is moved to its placement as soon as it
exists. The result is the oracle of all passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshmpi.compiler.collecting import without_collection
from meshmpi.compiler.lowering.placement import FIRST, Placement, Splits
from meshmpi.compiler.lowering.redistribute import moves
from meshmpi.dims import Axes, Dimension, Layout, MeshShape, Shape
from meshmpi.errors import VariableError
from meshmpi.graph import Graph, Tensor, Update, Variable
from meshmpi.graph.fetches import needed_operations
from meshmpi.ir import kinds as ir
from meshmpi.ir.bands import Band
from meshmpi.ir.halos import HaloRegion
from meshmpi.ir.kinds import AllGather, AllReduce, Contract, Map, Read, Redistribution, Reduce, Transpose, View, Write
from meshmpi.ir.kinds.shaping import AlongDim, aligned_groups, view_splits
from meshmpi.ir.program import Instruction, Kind, LocalType, Program, Source, VariableType
from meshmpi.ir.scalar import Expr, Step, call
from meshmpi.ir.verify import Proven, verify


@without_collection()
def lower(
    graph: Graph,
    mesh: MeshShape,
    layout: Layout,
    fetches: Mapping[str, Tensor],
    updates: Sequence[Update],
    storage: Layout | None = None,
    seed: int = 0,
    proven: Proven | None = None,
    shared: Axes = (),
) -> Program:
    """The unoptimised, verified SPMD program of one step.

    Args:
        graph, mesh, layout: What is lowered, for which mesh, in which computation layout.
        fetches: Name -> tensor to return.
        updates: Variables to update at the end of the step.
        storage: Storage rules for variables without rules of their own; default: first dimensions are split over
            ``shared``, so that a host holds a variable once.
        seed: Seed of all random numbers.
        proven: Takes the instructions that passed, for the passes.
        shared: Mesh axes along which ranks read each other's memory.

    Raises:
        LayoutError: The layout is illegal for this graph and mesh.
    """
    operations = needed_operations(graph, [*fetches.values(), *(u.value for u in updates)])
    once = [(FIRST, shared)] if shared else ()
    placement = Placement(graph, mesh, layout, Layout(once) if storage is None else storage, operations)
    lowering = Lowering(mesh, placement, shared)
    for operation in operations:
        lowering.source = operation.source
        operation.lower(lowering)
    results = {name: lowering.old_value(t) if updates else lowering.value(t) for name, t in fetches.items()}
    lowering.write(updates)
    program = Program(
        mesh, lowering.types, tuple(lowering.instructions), lowering.variables, lowering.feeds, results, seed
    )
    verify(program, proven)
    return program


class Lowering:
    """What an operation sees while it is lowered.

    Values are numbers; `type_of(tensor)` is the type a tensor must end up with, `types[value]` the
    one a value has.
    """

    def __init__(self, mesh: MeshShape, placement: Placement, shared: Axes = ()):
        self.mesh, self.shared = mesh, shared
        self.placement = placement
        self.types: dict[int, LocalType] = {}
        self.instructions: list[Instruction] = []
        self.variables: dict[str, VariableType] = {}
        self.feeds: dict[str, LocalType] = {}
        self.values: dict[Tensor, int] = {}
        self.source = Source("", "", 0)
        self._reads: dict[str, int] = {}
        self._variable_of: dict[int, VariableType] = {}  # of values that are its block
        # A program has few distinct types: each is made once.
        self._known: dict[LocalType, LocalType] = {}
        self._finished: dict[tuple[Shape, str, Splits], LocalType] = {}
        # The blocks of variables and feeds themselves, perhaps under other names; never iterated.
        self._stored: set[int] = set()

    # ---- types -----------------------------------------------------------------------------

    def type_of(self, t: Tensor) -> LocalType:
        """The finished type of a tensor in its placement."""
        parts = t.shape, t.dtype, self.placement.splits[t]
        if parts not in self._finished:
            self._finished[parts] = LocalType(*parts)
        return self._finished[parts]

    @staticmethod
    def splits_of(t: LocalType) -> dict[str, Axes]:
        """Dimension name -> its axes."""
        return dict(zip(t.shape.names, t.splits, strict=True))

    def pending(self, t: LocalType, axes: Sequence[str], op: str = "sum") -> LocalType:
        """``t`` with a reduction still pending over ``axes``."""
        partial = self.mesh.in_mesh_order(axes)
        return LocalType(t.shape, t.dtype, t.splits, partial, op if partial else "sum")

    def like_input(self, value: int, t: Tensor) -> LocalType:
        """Shape and type of ``t``, split as ``value`` is in the dims that both have."""
        x = self.types[value]
        return LocalType(t.shape, t.dtype, tuple(x.split(n) for n in t.shape.names))

    # ---- emitting --------------------------------------------------------------------------

    def emit_many(self, attrs: Kind, inputs: Sequence[int], types: Sequence[LocalType]) -> list[int]:
        """Appends an instruction; returns the numbers of its results."""
        outputs = tuple(range(len(self.types), len(self.types) + len(types)))
        for v, t in zip(outputs, types, strict=True):
            self.types[v] = self._known.setdefault(t, t)
        self.instructions.append(Instruction(attrs, tuple(inputs), outputs, self.source))
        if attrs.traits.given or (attrs.traits.same_memory and inputs[0] in self._stored):
            self._stored.update(outputs)
            if inputs and inputs[0] in self._variable_of and types[0] == self.types[inputs[0]]:
                self._variable_of[outputs[0]] = self._variable_of[inputs[0]]
        return list(outputs)

    def emit(self, attrs: Kind, inputs: Sequence[int], type: LocalType) -> int:
        """Appends an instruction with one result; returns its number."""
        return self.emit_many(attrs, inputs, [type])[0]

    def local(self, attrs: Kind, values: Sequence[int], output: Tensor) -> int:
        """Emits a local instruction whose result is split as its first input is."""
        return self.emit(attrs, values, self.like_input(values[0], output))

    def resized(self, attrs: AlongDim, value: int, size: int) -> int:
        """Emits a local instruction that changes the size of its dim and nothing else."""
        x = self.types[value]
        shape = Shape([Dimension(d.name, size) if d.name == attrs.dim else d for d in x.shape])
        return self.emit(attrs, [value], LocalType(shape, x.dtype, x.splits))

    def is_split(self, value: int, dim: str) -> bool:
        """Whether ranks hold blocks of ``dim``."""
        return bool(self.types[value].split(dim))

    def _move(self, value: int, move: Redistribution) -> int:
        variable = self._variable_of.get(value)
        if variable is not None and isinstance(move, AllGather) and move.dim == variable.type.shape[0].name:
            joined = variable.joined
            move = replace(move, joined=move.axes == joined[len(joined) - len(move.axes) :])
        return self.emit(move, [value], move.result(self.mesh, self.types[value]))

    # ---- values ----------------------------------------------------------------------------

    def value(self, t: Tensor) -> int:
        """The finished value of a tensor, in its placement."""
        return self.values[t]

    def finish(self, value: int) -> int:
        """``value`` without a pending reduction: at most one all_reduce."""
        t = self.types[value]
        if not t.partial:
            return value
        return self._move(value, AllReduce(t.partial, t.pending))

    def redistribute(self, value: int, splits: Splits) -> int:
        """``value``, which must be finished, with other splits: by the moves of `moves`."""
        if self.types[value].splits != splits:
            for move in moves(self.mesh, self.types[value], splits):
                value = self._move(value, move)
        return value

    def fit(self, t: Tensor, splits: Mapping[str, Axes]) -> int:
        """The value of ``t`` with the dims named in ``splits`` split so."""
        value = self.value(t)
        x = self.types[value]
        return self.redistribute(value, tuple([splits.get(d.name, s) for d, s in zip(x.shape, x.splits, strict=True)]))

    def computed(self, t: Tensor) -> int:
        """The value of ``t`` in the computation layout, whatever it is constrained to."""
        return self.redistribute(self.value(t), self.placement.base(t.shape))

    def whole(self, t: Tensor, dim: str) -> int:
        """The value of ``t`` in the computation layout, but with ``dim`` whole."""
        base = zip(t.shape.names, self.placement.base(t.shape), strict=True)
        return self.redistribute(self.value(t), tuple(() if n == dim else s for n, s in base))

    def shift(
        self,
        values: Sequence[int],
        output: Tensor,
        dim: str,
        offsets: Sequence[int],
        stride: int = 1,
        wrap: bool = False,
        value: float = 0,
    ) -> int:
        """y[o] = x_j[stride * o + offset_j] along ``dim``, split alike in all values, else value.

        Emits a neighbour exchange; see `HaloExchange` for what each rank sends.
        """
        t = self.like_input(values[0], output)
        return self.emit(ir.Shift(dim, t.split(dim), stride, tuple(offsets), wrap, value), values, t)

    def halo(self, value: int, dim: str, halo: HaloRegion, wrap: bool = False) -> int:
        """``value`` with its split ``dim`` held with halos instead of blocks: a halo exchange."""
        x = self.types[value]
        halos = list(x.halos or (None,) * len(x.shape))
        halos[x.shape.position(dim)] = halo
        t = LocalType(x.shape, x.dtype, x.splits, halos=tuple(halos))
        return self.emit(ir.Shift(dim, x.split(dim), 1, (0,), wrap, 0), [value], t)

    def define(self, t: Tensor, value: int) -> None:
        """Makes ``value`` (finished and redistributed to its placement) the value of ``t``."""
        self.values[t] = self.redistribute(self.finish(value), self.placement.splits[t])

    # ---- local building blocks -----------------------------------------------------------------

    def reduce(self, value: int, op: str, output_shape: Shape, band: Band | None = None) -> int:
        """Reduces over the dims that ``output_shape`` lacks, and finishes over their axes."""
        x = self.types[value]
        gone = [a for n in x.shape.names if output_shape.find(n) < 0 for a in x.split(n)]
        kept = LocalType(output_shape, x.dtype, tuple(x.split(n) for n in output_shape.names))
        return self.finish(self.emit(Reduce(op, band), [value], self.pending(kept, gone, op)))

    def transpose(self, value: int, shape: Shape) -> int:
        x = self.types[value]
        if x.shape == shape:
            return value
        t = LocalType(shape, x.dtype, tuple(x.split(n) for n in shape.names))
        return self.emit(Transpose(), [value], t)

    def cast(self, value: int, dtype: str) -> int:
        x = self.types[value]
        if x.dtype == dtype:
            return value
        expr = Expr((Step("cast", ("i0",), dtype),), ("t0",))
        return self.emit(Map(expr), [value], LocalType(x.shape, dtype, x.splits))

    def reshape(self, value: int, output: Tensor) -> int:
        """The same elements under the dims of ``output``; what cannot be viewed is joined first."""
        x = self.types[value]
        before, after = self.splits_of(x), dict[str, Axes]()
        for ins, outs in aligned_groups(x.shape, output.shape):
            splits = [before[d.name] for d in ins]
            result = self._view_group(ins, splits, outs)
            before.update((d.name, s) for d, s in zip(ins, splits, strict=True))
            after.update((d.name, s) for d, s in zip(outs, result, strict=True))
        value = self.redistribute(value, tuple(before[n] for n in x.shape.names))
        t = LocalType(output.shape, x.dtype, tuple(after[n] for n in output.shape.names))
        return self.emit(View(), [value], t)

    def _view_group(self, ins: Sequence[Dimension], splits: list[Axes], outs: Sequence[Dimension]) -> list[Axes]:
        """Shortens ``splits`` in place, last axes first, until the group can be viewed locally."""
        lead = next((k for k, d in enumerate(ins) if d.size > 1), 0)
        for k in range(len(ins)):
            if k != lead:
                splits[k] = ()
        while (result := view_splits(self.mesh, ins, splits, outs)) is None:
            splits[lead] = splits[lead][:-1]
        return result

    def contract(self, values: Sequence[int], output_shape: Shape, band: Band | None = None) -> int:
        """Sum of products of all values over the dims that ``output_shape`` lacks.

        With a ``band``, of two values that share or keep all their dims.
        """
        values = list(values)
        for i, j in self._contraction_order(values, output_shape):
            a, b = values[min(i, j)], values[max(i, j)]
            del values[max(i, j)], values[min(i, j)]
            shape = self._pair_shape(a, b, values, output_shape) if values else output_shape
            values.append(self._contract_pair(a, b, shape, band))
        return values[0]

    def _contraction_order(self, values: Sequence[int], output_shape: Shape) -> list[tuple[int, int]]:
        if len(values) == 2:
            return [(0, 1)]
        shapes = [dict(zip(self.types[v].shape.names, self.types[v].max_sizes(self.mesh), strict=True)) for v in values]
        return _contraction_path(shapes, output_shape.names)

    def _pair_shape(self, a: int, b: int, others: Sequence[int], output_shape: Shape) -> Shape:
        """Dims of a and b that the output or another operand still needs."""
        needed = {n for v in others for n in self.types[v].shape.names} | {*output_shape.names}
        dims = dict.fromkeys([*self.types[a].shape, *self.types[b].shape])
        return Shape([d for d in dims if d.name in needed])

    def _contract_pair(self, a: int, b: int, shape: Shape, band: Band | None) -> int:
        a, b = self._sum_alone(a, b, shape), self._sum_alone(b, a, shape)
        a, b = self._without_clash(a, b)
        x, y = self.types[a], self.types[b]
        splits = {**self.splits_of(x), **self.splits_of(y)}
        gone = [ax for n, s in splits.items() if shape.find(n) < 0 for ax in s]
        t = LocalType(shape, x.dtype, tuple(splits[n] for n in shape.names))
        return self.finish(self.emit(Contract(band), [a, b], self.pending(t, gone)))

    def _sum_alone(self, value: int, other: int, shape: Shape) -> int:
        """Sums ``value`` over dims that neither the other operand nor the result has."""
        x, y = self.types[value].shape, self.types[other].shape
        kept = Shape([d for d in x if y.find(d.name) >= 0 or shape.find(d.name) >= 0])
        return value if kept == x else self.reduce(value, "sum", kept)

    def _without_clash(self, a: int, b: int) -> tuple[int, int]:
        """Splits b as a is in the dims of both, and joins its other dims that would take a's axes."""
        x, y = self.types[a], self.types[b]
        used = x.used_axes
        splits = tuple(
            x.split(n) if x.shape.find(n) >= 0 else () if any(ax in used for ax in s) else s
            for n, s in self.splits_of(y).items()
        )
        return a, self.redistribute(b, splits)

    # ---- feeds, variables ------------------------------------------------------------------

    def add_feed(self, name: str, t: LocalType) -> None:
        self.feeds[name] = t

    def _declare(self, variable: Variable) -> LocalType:
        t = LocalType(variable.shape, variable.dtype, self.placement.stored(variable))
        if variable.name not in self.variables:
            joined = self._joined(t)
            made = VariableType(variable.name, t, variable.initializer, variable.trainable, joined)
            self.variables[variable.name] = made
        return t

    def _joined(self, t: LocalType) -> Axes:
        """Axes over which the first dimension is split in storage only, by ranks that share memory: its last ones."""
        base = self.placement.base(t.shape)
        if t.splits[1:] != base[1:] or t.splits[:1] == base[:1] or t.splits[0][: len(base[0])] != base[0]:
            return ()
        first = t.splits[0]
        for start in range(len(base[0]), len(first)):
            outer, inner = first[:start], first[start:]
            if set(inner) <= set(self.shared) and ir.nests(self.mesh, t.shape[0].size, outer, inner):
                return inner if self.mesh.count(inner) > 1 else ()
        return ()

    def read(self, variable: Variable) -> int:
        """The stored value of a variable; read once."""
        t = self._declare(variable)
        if variable.name not in self._reads:
            value = self._reads[variable.name] = self.emit(Read(variable.name), [], t)
            self._variable_of[value] = self.variables[variable.name]
        return self._reads[variable.name]

    def _apart(self, value: int) -> int:
        """A copy of ``value`` where it is the memory of a variable: two may swap values."""
        t = self.types[value]
        if value not in self._stored:
            return value
        return self.emit(Map(call("identity", 1, t.dtype)), [value], t)

    def old_value(self, t: Tensor) -> int:
        """The value of ``t`` to return from a step that writes variables."""
        self.source = t.source
        return self._apart(self.value(t))

    def write(self, updates: Sequence[Update]) -> None:
        """Stores the values of all updates; the writes stand behind everything else."""
        ready: dict[Variable, tuple[Tensor, int]] = {}
        for variable, new in updates:
            self.source = new.source
            if variable in ready:
                raise VariableError(
                    f"variable '{variable.name}' is updated twice in one step: to"
                    f" '{ready[variable][0].name}' and to '{new.name}'.",
                    "Give one mm.assign() of it, of a value that combines both.",
                    str(self.source),
                )
            t = self._declare(variable)
            value = self.redistribute(self.transpose(self.value(new), t.shape), t.splits)
            ready[variable] = new, self._apart(value)
        for variable, (new, value) in ready.items():
            self.source = new.source
            self.emit_many(Write(variable.name), [value], [])


def _contraction_path(operands: Sequence[Mapping[str, int]], output: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs of positions in opt_einsum's order; each pair is taken out and its product appended."""
    import opt_einsum  # pyright: ignore[reportMissingTypeStubs]  # late: only such products need it

    letters: dict[str, str] = {}
    for operand in operands:
        for n in operand:
            letters.setdefault(n, opt_einsum.get_symbol(len(letters)))
    left = ",".join("".join(letters[n] for n in operand) for operand in operands)
    equation = f"{left}->{''.join(letters[n] for n in output)}"
    shapes = [tuple(max(1, s) for s in operand.values()) for operand in operands]
    path, _ = opt_einsum.contract_path(equation, *shapes, shapes=True, optimize="auto")
    pairs: list[tuple[int, int]] = []
    count = len(operands)
    for step in path:
        positions = sorted(step)
        # A step may name one operand or more than two; take them pair by pair from the end.
        while len(positions) > 1:
            j, i = positions.pop(), positions.pop()
            pairs.append((i, j))
            count -= 1
            positions.append(count - 1)
    return pairs
