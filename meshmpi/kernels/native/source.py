"""C source of one map, reduction or segment, for the blocks of one rank.

Rows are the outer loops, columns the inner ones.  A value is ready in a *stage*: what needs the
result of a reduction along the row comes one stage later, and every stage is one loop over the
columns.  Values that a later stage needs stay in a row buffer, all others in registers.  Extents
and strides are written into the source as numbers.  Knows instructions and integers only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from meshmpi.dims import MeshShape
from meshmpi.kernels.native.scalars import C_TYPES, identity, load, number_type, step_source, store
from meshmpi.program import Instruction, LocalType

MAX_BUFFER_BYTES = 1 << 20
"""Row buffers of one function: they live on the stack.  Status: assumption (8 MB stacks)."""
MAX_SUMMED_COLUMNS = 1 << 14
"""Columns of a sum over rows: its partial sums live on the stack.  Status: assumption."""
BLOCK_ROWS = 64
"""Rows summed before their sum is added to the total: keeps rounding errors of float32 small."""
LONG_ROW = 4096
"""From this length on a float32 row is summed in float64."""


class Unsupported(Exception):
    """The instruction has no native form; NumPy does it."""


class Value:
    """A value of the loop nest.

    Attributes:
        strides: Dimension name -> distance between neighbours in memory, in elements.
        role: "point" (varies along columns), "row" (one per row) or "column" (summed over rows).
        stage: The stage in which it is ready; -1 before the first.
    """

    def __init__(self, t: LocalType, sizes: Mapping[str, int]):
        self.dtype = t.dtype
        self.strides: dict[str, int] = {}
        step = 1
        for name in reversed(t.shape.names):
            self.strides[name] = step
            step *= sizes[name]
        self.role, self.stage = "point", -1
        self.text = ""  # how to write it in C, once it is known


class LoopNest:
    """Names, extents and values of a function; merges dims that all values step through evenly."""

    def __init__(
        self, body: Sequence[Instruction], inputs: Sequence[int], outputs: Sequence[int],
        types: Mapping[int, LocalType], mesh: MeshShape, coordinates: Mapping[str, int],
    ):  # fmt: skip
        self.body, self.inputs, self.outputs = body, inputs, outputs
        full = self._full(body, types)
        self.sizes = dict(zip(full.shape.names, full.local_sizes(mesh, coordinates), strict=True))
        if not all(self.sizes.values()):
            raise Unsupported("an empty block")
        self.row_names = self._rows(body, types, full)
        used = [*inputs, *(v for i in body for v in i.outputs)]
        self.values = {v: Value(types[v], self.sizes) for v in used}
        self._roles(types, full)
        columns = [n for n in full.shape.names if n not in self.row_names]
        self.row_dims = self._merged(list(self.row_names))
        self.column_dims = self._merged(columns)
        self.columns = math.prod(self.sizes[n] for n in columns)
        self.rows = math.prod(self.sizes[n] for n in self.row_names)

    @staticmethod
    def _full(body: Sequence[Instruction], types: Mapping[int, LocalType]) -> LocalType:
        candidates = [types[i.inputs[0] if i.kind == "reduce" else i.outputs[0]] for i in body]
        return max(candidates, key=lambda t: len(t.shape))

    @staticmethod
    def _rows(
        body: Sequence[Instruction], types: Mapping[int, LocalType], full: LocalType
    ) -> tuple:
        for i in body:
            if i.kind == "reduce":
                names = types[i.outputs[0]].shape.names
                lead = full.shape.names[: len(names)]
                if names == lead:
                    return names
                rest = len(full.shape) - len(names)
                if names != full.shape.names[rest:] or i.attrs["op"] != "sum":
                    raise Unsupported("a reduction of inner dims")
                return full.shape.names[:rest]
        return full.shape.names[:-1]

    def _roles(self, types: Mapping[int, LocalType], full: LocalType) -> None:
        for i in self.body:
            for v in i.outputs:
                value = self.values[v]
                names = types[v].shape.names
                stages = [self._ready(x, i) for x in i.inputs]
                if i.kind == "reduce":
                    value.role = "row" if names == self.row_names else "column"
                    value.stage = max(stages)
                elif names != full.shape.names:
                    value.role, value.stage = "row", max([-1, *stages])
                else:
                    value.stage = max([0, *stages])

    def _ready(self, x: int, i: Instruction) -> int:
        """The first stage in which instruction i can use x."""
        value = self.values[x]
        if x in self.inputs:
            return 0 if i.kind == "reduce" else -1
        after = value.role == "row" and not (i.kind == "map" and self._is_row(i))
        return value.stage + after

    def _is_row(self, i: Instruction) -> bool:
        return all(n in self.row_names for n in self.values[i.outputs[0]].strides)

    def _merged(self, names: list[str]) -> list[tuple[int, dict[int, int]]]:
        """[(extent, value -> stride)] of the loops over these dims, outermost first."""
        dims: list[tuple[int, dict[int, int]]] = []
        for n in names:
            strides = {v: value.strides.get(n, 0) for v, value in self.values.items()}
            if self.sizes[n] == 1 and len(names) > 1:
                continue
            if dims and all(dims[-1][1][v] == s * self.sizes[n] for v, s in strides.items()):
                dims[-1] = (dims[-1][0] * self.sizes[n], strides)
            else:
                dims.append((self.sizes[n], strides))
        return dims or [(1, dict.fromkeys(self.values, 0))]


class Writer:
    """Writes the C function of a loop nest."""

    def __init__(self, nest: LoopNest):
        self.nest = nest
        self.lines: list[str] = []
        self.stored = dict.fromkeys(nest.outputs)
        self.order = {v: k for k, v in enumerate((*nest.inputs, *nest.outputs))}
        self.last_stage = max(v.stage for v in nest.values.values())
        self.buffered = self._buffered()

    def _buffered(self) -> dict[int, None]:
        """Point values that a later stage reads and that are not stored anyway."""
        out: dict[int, None] = {}
        for i in self.nest.body:
            stage = self._stage_of(i)
            for x in i.inputs:
                value = self.nest.values[x]
                internal = x not in self.nest.inputs and value.role == "point"
                if internal and value.stage < stage and x not in self.stored:
                    out[x] = None
        size = sum(8 * self.nest.columns for _ in out)
        if size > MAX_BUFFER_BYTES:
            raise Unsupported("rows that are too long to buffer")
        return out

    def _stage_of(self, i: Instruction) -> int:
        return self.nest.values[i.outputs[0]].stage

    # ---- the function ------------------------------------------------------------------------

    def text(self) -> str:
        """The body of the function: between its braces, for ``void name(void **p)``."""
        nest = self.nest
        for v, k in self.order.items():
            const = "const " if v not in self.stored else ""
            self.lines.append(f"{const}{C_TYPES[nest.values[v].dtype]} *p{k} = p[{k}];")
        summed = [i for i in nest.body if self._role(i) == "column"]
        if summed and nest.columns > MAX_SUMMED_COLUMNS:
            raise Unsupported("too many columns summed over rows")
        for i in summed:
            t = number_type(nest.values[i.outputs[0]].dtype)
            v = i.outputs[0]
            self.lines.append(
                f"static __thread {t} sum{v}[{nest.columns}], part{v}[{nest.columns}];"
            )
            self.lines.append(
                f"memset(sum{v}, 0, sizeof sum{v}); memset(part{v}, 0, sizeof part{v});"
            )
        if summed:
            self.lines.append("long row = 0;")
        self._rows_loop(bool(summed))
        for i in summed:
            self._finish_column(i.outputs[0])
        return "\n".join("  " + line for line in self.lines)

    def _role(self, i: Instruction) -> str:
        return self.nest.values[i.outputs[0]].role

    def _rows_loop(self, summed: bool) -> None:
        for k, (n, _) in enumerate(self.nest.row_dims):
            if k == 0 and not summed and self.nest.rows * self.nest.columns >= 1 << 16:
                self.lines.append("#pragma omp parallel for schedule(static)")
            self.lines.append(f"for (long r{k} = 0; r{k} < {n}; ++r{k}) {{")
        for v, k in self.order.items():
            offset = " + ".join(
                f"r{j} * {strides[v]}L"
                for j, (_, strides) in enumerate(self.nest.row_dims)
                if strides[v]
            )
            const = "const " if v not in self.stored else ""
            t = C_TYPES[self.nest.values[v].dtype]
            self.lines.append(f"{const}{t} *q{k} = p{k} + {offset or 0};")
        for v in self.buffered:
            t = number_type(self.nest.values[v].dtype)
            self.lines.append(f"{t} b{v}[{self.nest.columns}];")
        for v in self.nest.inputs:
            if not any(s[v] for _, s in self.nest.column_dims):
                t = number_type(self.nest.values[v].dtype)
                source = load(self.nest.values[v].dtype, f"q{self.order[v]}[0]")
                self.lines.append(f"const {t} x{v} = {source};")
        self._row_maps(-1)
        for stage in range(self.last_stage + 1):
            self._stage(stage)
            self._row_maps(stage)
        if summed:
            self._flush_parts()
        self.lines.extend("}" for _ in self.nest.row_dims)

    def _row_maps(self, stage: int) -> None:
        """Reductions finished and maps over rows that are ready after ``stage``."""
        for i in self.nest.body:
            if self._stage_of(i) != stage or self._role(i) != "row":
                continue
            if i.kind == "reduce":
                self._finish_reduction(i)
            else:
                self._steps(i, lambda x: f"x{x}", "x")
            for v in i.outputs:
                if v in self.stored:
                    dtype = self.nest.values[v].dtype
                    self.lines.append(f"q{self.order[v]}[0] = {store(dtype, f'x{v}')};")

    # ---- one stage -----------------------------------------------------------------------------

    def _stage(self, stage: int) -> None:
        body = [i for i in self.nest.body if self._stage_of(i) == stage and not self._later(i)]
        if not body:
            return
        for i in body:
            if i.kind == "reduce" and self._role(i) == "row":
                self._start_reduction(i)
        dims = self.nest.column_dims
        for k, (n, _) in enumerate(dims):
            if k == len(dims) - 1:
                self.lines.append("#pragma GCC ivdep")
            self.lines.append(f"for (long c{k} = 0; c{k} < {n}; ++c{k}) {{")
        loaded: dict[int, str] = {}
        for i in body:
            for x in i.inputs:
                self._load(x, stage, loaded)
            if i.kind == "map":
                self._steps(i, lambda x: loaded[x], "v")
                for v in i.outputs:
                    loaded[v] = f"v{v}"
            else:
                self._accumulate(i, loaded[i.inputs[0]])
        self._store_points(body)
        self.lines.extend("}" for _ in dims)

    def _later(self, i: Instruction) -> bool:
        """Whether it is a map over rows, done between the loops."""
        return i.kind == "map" and self._role(i) == "row"

    def _column(self, v: int) -> str:
        parts = [f"c{k} * {s[v]}L" for k, (_, s) in enumerate(self.nest.column_dims) if s[v]]
        return (" + ".join(parts) or "0").replace(" * 1L", "")

    def _flat(self) -> str:
        """Number of the present column."""
        text, dims = "c0", self.nest.column_dims
        for k in range(1, len(dims)):
            text = f"({text}) * {dims[k][0]} + c{k}"
        return text

    def _load(self, x: int, stage: int, loaded: dict[int, str]) -> None:
        if x in loaded:
            return
        value = self.nest.values[x]
        if x in self.nest.inputs:
            if any(s[x] for _, s in self.nest.column_dims):
                t = number_type(value.dtype)
                source = load(value.dtype, f"q{self.order[x]}[{self._column(x)}]")
                self.lines.append(f"const {t} v{x} = {source};")
                loaded[x] = f"v{x}"
            else:
                loaded[x] = f"x{x}"
        elif value.role == "row":
            loaded[x] = f"x{x}"
        elif value.stage < stage:
            t = number_type(value.dtype)
            kept = f"b{x}[{self._flat()}]"
            if x not in self.buffered:
                kept = load(value.dtype, f"q{self.order[x]}[{self._column(x)}]")
            self.lines.append(f"const {t} v{x} = {kept};")
            loaded[x] = f"v{x}"

    def _steps(self, i: Instruction, name, prefix: str) -> None:
        """The tape of a map; its results become ``{prefix}{value}``."""
        expr = i.attrs["expr"]
        names = {f"i{k}": name(x) for k, x in enumerate(i.inputs)}
        dtypes = {f"i{k}": self.nest.values[x].dtype for k, x in enumerate(i.inputs)}
        first = i.outputs[0]
        for k, step in enumerate(expr.steps):
            names[f"t{k}"] = f"t{first}_{k}"
            source = step_source(step, names, dtypes)
            dtypes[f"t{k}"] = step.dtype
            self.lines.append(f"const {number_type(step.dtype)} t{first}_{k} = {source};")
        for v, r in zip(i.outputs, expr.results, strict=True):
            self.lines.append(
                f"const {number_type(self.nest.values[v].dtype)} {prefix}{v} = {names[r]};"
            )

    def _store_points(self, body: Sequence[Instruction]) -> None:
        # All stores come last: a result may have the memory of an input of the same point.
        for i in body:
            for v in i.outputs:
                if self.nest.values[v].role != "point":
                    continue
                if v in self.stored:
                    dtype = self.nest.values[v].dtype
                    self.lines.append(
                        f"q{self.order[v]}[{self._column(v)}] = {store(dtype, f'v{v}')};"
                    )
                elif v in self.buffered:
                    self.lines.append(f"b{v}[{self._flat()}] = v{v};")

    # ---- reductions ------------------------------------------------------------------------------

    def _accumulator(self, i: Instruction) -> str:
        """C type in which a reduction along a row is formed."""
        t = number_type(self.nest.values[i.inputs[0]].dtype)
        if i.attrs["op"] in ("max", "min"):
            return {"float": "int32_t", "double": "int64_t"}.get(t, t)
        return "double" if t == "float" and self.nest.columns > LONG_ROW else t

    def _start_reduction(self, i: Instruction) -> None:
        v, dtype = i.outputs[0], self.nest.values[i.inputs[0]].dtype
        self.lines.append(f"{self._accumulator(i)} a{v} = {identity(i.attrs['op'], dtype)};")

    def _accumulate(self, i: Instruction, x: str) -> None:
        v, op = i.outputs[0], i.attrs["op"]
        if self._role(i) == "column":
            self.lines.append(f"part{v}[{self._flat()}] += {x};")
        elif op == "sum":
            self.lines.append(f"a{v} += {x};")
        elif op == "prod":
            self.lines.append(f"a{v} *= {x};")
        else:
            t = number_type(self.nest.values[i.inputs[0]].dtype)
            key = {"float": "key_f32", "double": "key_f64"}.get(t, "")
            x = f"{key}({'-' if op == 'min' and key else ''}{x})"
            better = "<" if op == "min" and not key else ">"
            self.lines.append(
                f"{{ const {self._accumulator(i)} k = {x}; a{v} = k {better} a{v} ? k : a{v}; }}"
            )

    def _finish_reduction(self, i: Instruction) -> None:
        v, op = i.outputs[0], i.attrs["op"]
        t = number_type(self.nest.values[v].dtype)
        source = f"a{v}"
        if op in ("max", "min") and t in ("float", "double"):
            source = f"unkey_{'f32' if t == 'float' else 'f64'}(a{v})"
            source = f"-{source}" if op == "min" else source
        self.lines.append(f"const {t} x{v} = {source};")

    def _flush_parts(self) -> None:
        self.lines.append(f"if ((++row & {BLOCK_ROWS - 1}) == 0 || row == {self.nest.rows}) {{")
        for i in self.nest.body:
            if self._role(i) == "column":
                v = i.outputs[0]
                self.lines.append(
                    f"for (long c = 0; c < {self.nest.columns}; ++c)"
                    f" {{ sum{v}[c] += part{v}[c]; part{v}[c] = 0; }}"
                )
        self.lines.append("}")

    def _finish_column(self, v: int) -> None:
        source = store(self.nest.values[v].dtype, f"sum{v}[c]")
        self.lines.append(
            f"for (long c = 0; c < {self.nest.columns}; ++c) p{self.order[v]}[c] = {source};"
        )


def function_body(
    i: Instruction, types: Mapping[int, LocalType], mesh: MeshShape, coordinates: Mapping[str, int]
) -> str:
    """C statements of one instruction of kind map, reduce or segment.

    Raises:
        Unsupported: Nothing native is generated for it.
    """
    body = i.attrs["body"] if i.kind == "segment" else (i,)
    if i.kind == "segment":
        types = {**types, **i.attrs["inner"]}
    if not i.inputs:
        raise Unsupported("no inputs")
    nest = LoopNest(body, i.inputs, i.outputs, types, mesh, coordinates)
    return Writer(nest).text()
