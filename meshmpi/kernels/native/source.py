"""C source of one map, reduction, random instruction or fused kernel, for the blocks of one rank.

Values that a later stage needs stay in a row buffer, all others in registers.  Extents and strides
are written into the source as numbers.  Sums over the rows are formed in chunks of rows whose
number depends on the extents only, so results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from meshmpi.ir.bands import Band
from meshmpi.ir.kinds import Map, Random, Reduce
from meshmpi.ir.program import Instruction
from meshmpi.kernels.native import scalars
from meshmpi.kernels.native.nest import LoopNest
from meshmpi.kernels.native.scalars import C_TYPES, load, number_type, store
from meshmpi.kernels.native.storage import BLOCK_ROWS, Storage

LONG_ROW = 4096
"""Columns summed in float32 before their sum is added to a float64 total."""
LONG_ROW_PIECES = 4096
"""Most pieces of a long row: their sums live on the stack."""


def least(a: str, b: int) -> str:
    """C expression of the smaller one."""
    return f"{a} < {b} ? {a} : {b}"


class Body(NamedTuple):
    """A C function ``void name(void **p)``.

    Attributes:
        text: What is between its braces.
        scratch_bytes: Size of the workspace that it needs; the address is then the last of ``p``.
    """

    text: str
    scratch_bytes: int = 0


class Writer(Storage):
    """Writes the C function of a loop nest."""

    def __init__(self, nest: LoopNest, counting: Collection[int] = ()):
        super().__init__(nest)
        self.lines: list[str] = []
        self.order = {v: k for k, v in enumerate(nest.operands)}
        self.last_stage = max(v.stage for v in nest.values.values())
        self.counting = [v for v in nest.inputs if v in counting and nest.in_columns(v)]
        self.span = ("0", str(nest.column_dims[-1][0]))  # of the innermost loop
        self.first_column = ""

    def _emit(self, *lines: str) -> None:
        self.lines.extend(lines)

    # ---- the function ------------------------------------------------------------------------

    def body(self) -> Body:
        """The function."""
        for v, k in self.order.items():
            const = "const " if v not in self.stored else ""
            self._emit(f"{const}{C_TYPES[self.nest.values[v].dtype]} *p{k} = p[{k}];")
        for v in self.counting:
            self._emit(f"const {self._type(v)} {self._name('first', v)} = p{self.order[v]}[0];")
        for k, v in enumerate(self.nest.keys, len(self.nest.operands)):
            source = f"((const uint64_t *)p[{k}])"
            self._emit(f"const uint64_t {self._name('key', v)} = {source}[0];")
            self._emit(f"const uint64_t {self._name('base', v)} = {source}[1];")
        parameters = len(self.nest.operands) + len(self.nest.keys)
        for k in range(len(self.nest.bands)):
            source = f"((const int64_t *)p[{parameters + k}])[0]"
            self._emit(f"const int32_t first_far{k} = (int32_t){source};")
        if self.scratch_bytes:
            self._emit(f"char *scratch = p[{parameters + len(self.nest.bands)}];")
        if self.sums:
            self._chunked_rows()
        else:
            self._rows_loop()
        return Body("\n".join("  " + line for line in self.lines), self.scratch_bytes)

    def _rows_loop(self) -> None:
        dims = self.nest.row_dims
        if self.nest.rows > 1 and self.nest.threads_pay:
            collapse = f" collapse({len(dims)})" if len(dims) > 1 else ""
            self._emit(f"#pragma omp parallel for schedule(static){collapse}{self.limit}")
        for k, (n, _) in enumerate(dims):
            self._emit(f"for (long r{k} = 0; r{k} < {n}; ++r{k}) {{")
        self._row()
        self._emit(*("}" for _ in dims))

    def _chunked_rows(self) -> None:
        """The rows loop with sums over the rows: each chunk of rows has sums of its own."""
        nest, width = self.nest, self.width
        for v in self.sums:
            self._array(self._type(v), self._name("sums", v), self.chunks * nest.columns)
        if nest.threads_pay and self.chunks * self.column_blocks > 1:
            self._emit(f"#pragma omp parallel for schedule(static) collapse(2){self.limit}")
        self._emit(
            f"for (long k = 0; k < {self.chunks}; ++k)", f"for (long w = 0; w < {nest.columns}; w += {width}) {{"
        )
        if self.column_blocks > 1:
            self._emit(f"const long we = {least(f'w + {width}', nest.columns)};")
            self.span, self.first_column = ("w", "we"), " - w"
        self._chunk_accumulators()
        self._emit(f"const long last = {least(f'(k + 1) * {self.chunk_rows}', nest.rows)};")
        self._emit(f"for (long row = k * {self.chunk_rows}; row < last; ++row) {{")
        inner = 1
        for k in range(len(nest.row_dims) - 1, -1, -1):
            n = nest.row_dims[k][0]
            mod = f" % {n}" if k else ""
            self._emit(f"const long r{k} = row{f' / {inner}' if inner > 1 else ''}{mod};")
            inner *= n
        self._row()
        if self.two_level:
            self._flush_parts()
        self._emit("}", "}")
        for v in self.sums:
            self._finish_column(v)

    def _chunk_accumulators(self) -> None:
        width = self.width
        for v in self.sums:
            t, total, part = self._type(v), self._name("sum", v), self._name("part", v)
            count = "(we - w)" if self.column_blocks > 1 else str(width)
            self._emit(
                f"{t} *{total} = {self._name('sums', v)} + k * {self.nest.columns}L + w;",
                f"memset({total}, 0, {count} * sizeof({t}));",
            )
            if self.two_level:
                self._array(t, part, width)
                self._emit(f"memset({part}, 0, {width} * sizeof({t}));")

    def _array(self, t: str, name: str, count: int) -> None:
        """Declares an array: on the stack, or in the workspace."""
        if name not in self.places:
            self._emit(f"{t} {name}[{count}];")
            return
        offset, of_thread = self.places[name]
        own = f" + thread_here() * {of_thread}L" if of_thread and self.threads > 1 else ""
        self._emit(f"{t} *{name} = ({t} *)(scratch + {offset}L{own});")

    def _row(self) -> None:
        """All stages of one row."""
        nest = self.nest
        for v, k in self.order.items():
            const = "const " if v not in self.stored else ""
            t = C_TYPES[nest.values[v].dtype]
            self._emit(f"{const}{t} *q{k} = p{k} + {self._row_offset(v)};")
        for v in nest.keys:
            offset, key = self._row_offset(("counter", v)), self._name("key", v)
            counter = f"({self._name('base', v)} + {offset}) * {key}"
            self._emit(f"const uint64_t {self._name('y', v)} = {counter};")
        for k, band in enumerate(nest.bands):
            row, column = (self._row_offset(("index", n)) for n in (band.rows, band.columns))
            self._emit(f"const int32_t far{k} = first_far{k} + (int32_t)({row} - ({column}));")
        for v in self.buffered:
            if v not in self.lent:
                self._array(self._type(v), self._name("b", v), nest.columns)
        for v in nest.inputs:
            if not nest.in_columns(v):
                source = load(nest.values[v].dtype, f"q{self.order[v]}[0]")
                self._emit(f"const {self._type(v)} {self._name('x', v)} = {source};")
        self._row_maps(-1)
        for stage in range(self.last_stage + 1):
            self._stage(stage)
            self._row_maps(stage)

    def _row_offset(self, key: object) -> str:
        dims = enumerate(self.nest.row_dims)
        return " + ".join(f"r{k} * {s[key]}L" for k, (_, s) in dims if s[key]) or "0"

    def _row_maps(self, stage: int) -> None:
        """Reductions finished and maps over rows that are ready after ``stage``."""
        for i in self.nest.body:
            if self.nest.stage(i) != stage or self.nest.role(i) != "row":
                continue
            if isinstance(i.attrs, Reduce):
                self._finish_reduction(i)
            elif isinstance(i.attrs, Random):
                self._random(i.outputs[0], "x", self._name("y", i.outputs[0]))
            else:
                self._steps(i, lambda x: self._name("x", x), "x")
            for v in i.outputs:
                if v in self.stored:
                    value = store(self.nest.values[v].dtype, self._name("x", v))
                    self._emit(f"q{self.order[v]}[0] = {value};")

    # ---- one stage -----------------------------------------------------------------------------

    def _stage(self, stage: int) -> None:
        nest = self.nest
        body = [i for i in nest.body if nest.stage(i) == stage]
        body = [i for i in body if isinstance(i.attrs, Reduce) or nest.role(i) != "row"]
        if not body:
            return
        sums = [i for i in body if isinstance(i.attrs, Reduce) and nest.role(i) == "row"]
        n = nest.column_dims[-1][0]
        floats = any(self._type(i.inputs[0]) == "float" and i.of(Reduce).op == "sum" for i in sums)
        alone = nest.rows == 1 and nest.threads_pay
        if len(nest.column_dims) == 1 and n > LONG_ROW and (floats or alone) and not self.sums:
            self._long_row(body, sums, alone)
            return
        for i in sums:
            self._start_reduction(i, self._accumulator(i))
        self._column_loops(body, stage)

    def _long_row(self, body: Sequence[Instruction], sums: Sequence[Instruction], alone: bool) -> None:
        """One stage of a long row in pieces, whose sums are added in float64."""
        n = self.nest.columns
        piece = LONG_ROW * -(-n // (LONG_ROW * LONG_ROW_PIECES))
        for i in sums:
            pieces = f"{self._name('pieces', i.outputs[0])}[{-(-n // piece)}]"
            self._emit(f"{self._accumulator(i)} {pieces};")
        if alone:
            self._emit("#pragma omp parallel for schedule(static)")
        self._emit(f"for (long w = 0; w < {n}; w += {piece}) {{")
        self._emit(f"const long we = {least(f'w + {piece}', n)};")
        for i in sums:
            self._start_reduction(i, self._accumulator(i))
        whole, self.span = self.span, ("w", "we")
        self._column_loops(body, self.nest.stage(body[0]))
        self.span = whole
        for i in sums:
            v = i.outputs[0]
            self._emit(f"{self._name('pieces', v)}[w / {piece}] = {self._name('a', v)};")
        self._emit("}")
        for i in sums:
            v, t = i.outputs[0], self._accumulator(i)
            self._start_reduction(i, "double" if t == "float" else t)
            self._emit(f"for (long w = 0; w < {-(-n // piece)}; ++w) {{")
            self._emit(self._combined(i, f"{self._name('pieces', v)}[w]", t), "}")

    def _column_loops(self, body: Sequence[Instruction], stage: int) -> None:
        nest = self.nest
        dims = nest.column_dims
        for k, (n, _) in enumerate(dims):
            start, stop = "0", str(n)
            if k == len(dims) - 1:
                start, stop = self.span
                self._emit("#pragma omp simd" + self._reduction_clauses(body))
            self._emit(f"for (long c{k} = {start}; c{k} < {stop}; ++c{k}) {{")
        loaded: dict[int, str] = {}
        for i in body:
            for x in i.inputs:
                self._load(x, stage, loaded)
            if isinstance(i.attrs, Reduce):
                self._accumulate(i, loaded[i.inputs[0]])
                continue
            if isinstance(i.attrs, Random):
                y, key = (self._name(prefix, i.outputs[0]) for prefix in ("y", "key"))
                offset = self._column_offset(("counter", i.outputs[0]))
                self._random(i.outputs[0], "v", f"{y} + (uint64_t)({offset}) * {key}")
            else:
                self._steps(i, lambda x: loaded[x], "v")
            for v in i.outputs:
                loaded[v] = self._name("v", v)
        self._store_points(body)
        self._emit(*("}" for _ in dims))

    def _reduction_clauses(self, body: Sequence[Instruction]) -> str:
        reduced = [i for i in body if isinstance(i.attrs, Reduce) and self.nest.role(i) == "row"]
        return "".join(f" reduction({self._operator(i)}: {self._name('a', i.outputs[0])})" for i in reduced)

    def _operator(self, i: Instruction) -> str:
        op = i.of(Reduce).op
        if op == "min" and self._type(i.inputs[0]) in ("float", "double"):
            op = "max"  # of the keys of negated numbers
        return {"sum": "+", "prod": "*"}.get(op, op)

    def _column_offset(self, key: object) -> str:
        dims = enumerate(self.nest.column_dims)
        parts = [f"c{k} * {s[key]}L" for k, (_, s) in dims if s[key]]
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
        value, nest = self.nest.values[x], self.nest
        if x in self.counting:
            offset = f"({self._type(x)})({self._row_offset(x)} + {self._column_offset(x)})"
            source = f"{self._name('first', x)} + {offset}"
        elif value.role == "row" or (x in nest.inputs and not nest.in_columns(x)):
            loaded[x] = self._name("x", x)
            return
        elif x not in nest.inputs and value.stage >= stage:
            return
        elif x not in nest.inputs and self._made_again(x):
            for y in self.maker[x].inputs:
                self._load(y, stage, loaded)
            self._steps(self.maker[x], lambda y: loaded[y], "v")
            loaded.update((v, self._name("v", v)) for v in self.maker[x].outputs)
            return
        else:
            place, dtype = self._kept(x)
            source = load(dtype, place)
        loaded[x] = self._name("v", x)
        self._emit(f"const {self._type(x)} {loaded[x]} = {source};")

    def _steps(self, i: Instruction, name: Callable[[int], str], prefix: str) -> None:
        """The steps of a map; its results become ``{prefix}{number}``."""
        expr = i.of(Map).expr
        names = {f"i{k}": name(x) for k, x in enumerate(i.inputs)}
        dtypes = {f"i{k}": self.nest.values[x].dtype for k, x in enumerate(i.inputs)}
        first = self._name("t", i.outputs[0])
        for k, step in enumerate(expr.steps):
            ref = names[f"t{k}"] = f"{first}_{k}"
            source = scalars.step_source(step, names, dtypes)
            dtypes[f"t{k}"] = step.dtype
            self._emit(f"const {number_type(step.dtype)} {ref} = {source};")
        for v, r in zip(i.outputs, expr.results, strict=True):
            self._emit(f"const {self._type(v)} {self._name(prefix, v)} = {names[r]};")

    def _random(self, v: int, prefix: str, counter: str) -> None:
        dtype = self.nest.values[v].dtype
        call = f"uniform_{dtype}({counter}, {self._name('key', v)})"
        self._emit(f"const {number_type(dtype)} {self._name(prefix, v)} = {call};")

    def _store_points(self, body: Sequence[Instruction]) -> None:
        # All stores come last: a result may have the memory of an input of the same point.
        for v in (v for i in body for v in i.outputs):
            if self.nest.values[v].role == "point" and (v in self.stored or v in self.buffered):
                place, dtype = self._kept(v)
                self._emit(f"{place} = {store(dtype, self._name('v', v))};")

    def _kept(self, v: int) -> tuple[str, str]:
        """Where a value of the present column is in memory, and as which data type."""
        if v in self.buffered:
            return self._buffer(v)
        return f"q{self.order[v]}[{self._column_offset(v)}]", self._dtype(v)

    def _buffer(self, v: int) -> tuple[str, str]:
        """Where a buffered value of the present column is kept, and as which data type.

        A row of its own has numbers as C computes with them, a lent one those of the result.
        """
        dtype = self.nest.values[v].dtype
        if v in self.lent:
            return f"q{self.order[self.lent[v]]}[{self._column_offset(self.lent[v])}]", dtype
        return f"{self._name('b', v)}[{self._flat()}]", scalars.COMPUTED_AS.get(dtype, dtype)

    # ---- reductions ------------------------------------------------------------------------------

    def _accumulator(self, i: Instruction) -> str:
        """C type in which a reduction along a row (or a piece of it) is formed."""
        t = self._type(i.inputs[0])
        if i.of(Reduce).op in ("max", "min"):
            return {"float": "int32_t", "double": "int64_t"}.get(t, t)
        nest = self.nest
        long = nest.columns > LONG_ROW and (len(nest.column_dims) > 1 or bool(self.sums))
        return "double" if t == "float" and long else t

    def _start_reduction(self, i: Instruction, t: str) -> None:
        v, dtype = i.outputs[0], self.nest.values[i.inputs[0]].dtype
        self._emit(f"{t} {self._name('a', v)} = {scalars.identity(i.of(Reduce).op, dtype)};")

    def _accumulate(self, i: Instruction, x: str) -> None:
        v, op, t = i.outputs[0], i.of(Reduce).op, self._type(i.inputs[0])
        if i.attrs.band is not None:
            x = f"({self._inside(i.attrs.band)} ? {x} : {scalars.neutral(op, self._dtype(i.inputs[0]))})"
        if self.nest.role(i) == "column":
            name = self._name("part" if self.two_level else "sum", v)
            self._emit(f"{name}[{self._flat()}{self.first_column}] += {x};")
            return
        key = {"float": "key_f32", "double": "key_f64"}.get(t) if op in ("max", "min") else None
        if key is not None:
            x = f"{key}({'-' if op == 'min' else ''}{x})"
        self._emit(self._combined(i, x, self._accumulator(i)))

    def _inside(self, band: Band) -> str:
        """Whether the pair of indices of the present point is in a band."""
        row, column = (self._column_offset(("index", n)) for n in (band.rows, band.columns))
        far = f"(far{self.nest.bands.index(band)} + (int32_t)({row}) - (int32_t)({column}))"
        bounds = ((">=", band.least), ("<=", band.most))
        return " & ".join(f"({far} {sign} {n})" for sign, n in bounds if n is not None) or "1"

    def _combined(self, i: Instruction, x: str, t: str) -> str:
        """Statement that takes one more number (or key) into a reduction along a row."""
        a, operator = self._name("a", i.outputs[0]), self._operator(i)
        if operator in "+*":
            return f"{a} {operator}= {x};"
        better = "<" if operator == "min" else ">"
        return f"{{ const {t} k = {x}; {a} = k {better} {a} ? k : {a}; }}"

    def _finish_reduction(self, i: Instruction) -> None:
        v, op, t = i.outputs[0], i.of(Reduce).op, self._type(i.outputs[0])
        source = self._name("a", v)
        if op in ("max", "min") and t in ("float", "double"):
            source = f"unkey_{'f32' if t == 'float' else 'f64'}({source})"
            source = f"-{source}" if op == "min" else source
        source = scalars.rounded(self.nest.values[v].dtype, source)
        self._emit(f"const {t} {self._name('x', v)} = {source};")

    def _flush_parts(self) -> None:
        """Adds the sums of a few rows to those of the chunk."""
        count = "(we - w)" if self.column_blocks > 1 else str(self.width)
        self._emit(f"if ((row + 1) % {BLOCK_ROWS} == 0 || row + 1 == last) {{")
        for v in self.sums:
            total, part = self._name("sum", v), self._name("part", v)
            added = f"{{ {total}[c] += {part}[c]; {part}[c] = 0; }}"
            self._emit("#pragma omp simd", f"for (long c = 0; c < {count}; ++c) {added}")
        self._emit("}")

    def _finish_column(self, v: int) -> None:
        sums, t = self._name("sums", v), self._type(v)
        self._emit(
            "#pragma omp simd",
            f"for (long c = 0; c < {self.nest.columns}; ++c) {{",
            f"{t} total = {sums}[c];",
            f"for (long k = 1; k < {self.chunks}; ++k)",
            f"  total += {sums}[k * {self.nest.columns}L + c];",
            f"p{self.order[v]}[c] = {store(self.nest.values[v].dtype, 'total')};",
            "}",
        )
