"""Where the C function of a loop nest keeps values: rows of a buffer, the workspace, or the result's own memory."""

from __future__ import annotations

import numpy as np

from meshmpi.ir.kinds import Map
from meshmpi.kernels.binding import Scratch
from meshmpi.kernels.native.nest import LoopNest
from meshmpi.kernels.native.scalars import number_type

_BYTE = np.dtype(np.uint8)
STACK_BYTES = 1 << 15
"""Buffers larger than this lie in the workspace.  Status: assumption (8 MB stacks)."""
WIDE_BYTES = 1 << 24
"""All buffers of the threads that share the rows, if a row is wide; fewer threads where they would
need more.  Status: assumption."""
BLOCK_ROWS = 64
"""Rows summed before their sum is added to the total: keeps rounding errors of float32 small."""
MOST_CHUNKS = 16
"""Chunks of rows that threads can share in a sum over the rows.  Status: assumption."""
COLUMN_BLOCK = 2048
"""Columns summed over all rows before the next, where nothing needs whole rows."""


class Storage:
    """Decides what is kept, where, and how sums over the rows are cut.

    Attributes:
        scratch_bytes: Size of the workspace that the function needs.
    """

    def __init__(self, nest: LoopNest):
        self.nest = nest
        self.stored = dict.fromkeys(nest.outputs)
        self.sums = [i.outputs[0] for i in nest.body if nest.role(i) == "column"]
        self.maker = {v: i for i in nest.body for v in i.outputs}
        self.buffered = self._buffered()
        self.lent = self._lent()
        self._plan_sums()
        self._plan_scratch()

    def _name(self, prefix: str, v: int) -> str:
        return f"{prefix}{self.nest.values[v].number}"

    def _dtype(self, v: int) -> str:
        return self.nest.values[v].dtype

    def _type(self, v: int) -> str:
        return number_type(self._dtype(v))

    def _size(self, v: int) -> int:
        """Bytes of a number as C computes with it, rounded up to those of an int."""
        return 8 if self._type(v) in ("double", "int64_t") else 4

    def _buffered(self) -> list[int]:
        """Point values that a later stage reads and that are not stored anyway."""
        nest, out = self.nest, dict[int, None]()
        for i in nest.body:
            for x in i.inputs:
                internal = x not in nest.inputs and x not in self.stored and nest.values[x].role == "point"
                if internal and nest.values[x].stage < nest.stage(i) and not self._made_again(x):
                    out[x] = None
        return list(out)

    def _lent(self) -> dict[int, int]:
        """Buffered value -> a result whose row may hold it until that result itself is made.

        A buffer of its own would be another row to keep in cache.  Measured: cross-entropy over
        8,192 columns takes 1.2 times as long with one.  No result of several stages has the memory
        of an input (`meshmpi.compiler.passes.memory`), so nothing is overwritten that is still to be read.
        """
        nest, lent = self.nest, dict[int, int]()
        for v in self.buffered:
            last = max(nest.stage(i) for i in nest.body if v in i.inputs)
            for y in self.stored:
                result = nest.values[y]
                fits = result.role == "point" and result.dtype == nest.values[v].dtype
                if fits and result.stage >= last and y not in lent.values():
                    lent[v] = y
                    break
        return lent

    def _made_again(self, v: int) -> bool:
        """Whether later stages compute v again: bytes among floats would slow their loops."""
        i, nest = self.maker[v], self.nest
        if nest.values[v].dtype != "bool" or not isinstance(i.attrs, Map) or v in self.stored:
            return False
        return all(x in nest.inputs or nest.values[x].role == "row" for x in i.inputs)

    def _plan_sums(self) -> None:
        """How sums over the rows are cut: chunks of rows, blocks of columns."""
        nest = self.nest
        whole_rows = len(nest.column_dims) > 1 or any(nest.role(i) == "row" for i in nest.body)
        self.width = nest.columns if whole_rows else min(nest.columns, COLUMN_BLOCK)
        if nest.columns < 2 * self.width:
            self.width = nest.columns
        self.column_blocks = -(-nest.columns // self.width)
        parallel = nest.threads_pay and self.column_blocks < MOST_CHUNKS
        most = -(-nest.rows // BLOCK_ROWS)
        self.chunks = min(MOST_CHUNKS, most) if parallel else 1
        self.chunk_rows = -(-nest.rows // self.chunks)
        self.chunks = -(-nest.rows // self.chunk_rows)
        self.two_level = self.chunk_rows > 2 * BLOCK_ROWS

    def _plan_scratch(self) -> None:
        """Where in the workspace sums over the rows and wide buffers lie."""
        scratch, nest = Scratch(), self.nest
        self.places: dict[str, tuple[int, int]] = {}  # name -> offset, bytes of one thread
        for v in self.sums:
            slot = scratch.reserve((self.chunks * nest.columns * self._size(v),), _BYTE)
            self.places[self._name("sums", v)] = slot.offset, 0
        wide = {self._name("b", v): nest.columns * self._size(v) for v in self.buffered if v not in self.lent}
        if self.two_level:
            wide.update((self._name("part", v), self.width * self._size(v)) for v in self.sums)
        wide = {name: n for name, n in wide.items() if n > STACK_BYTES}
        shared = nest.threads_pay and nest.rows > 1
        most = min(MOST_CHUNKS, nest.rows, WIDE_BYTES // max(1, sum(wide.values())))
        self.threads = max(1, most) if shared else 1
        for name, nbytes in wide.items():
            slot = scratch.reserve((self.threads, -(-nbytes // 64) * 64), _BYTE)
            self.places[name] = slot.offset, slot.shape[1]
        self.limit = f" num_threads(at_most({self.threads}))" if wide and shared else ""
        self.scratch_bytes = scratch.bytes
