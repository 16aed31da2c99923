"""C source of scatter_add: every thread adds all updates to columns of its own.

So results do not depend on the number of threads, and rows need not be sorted.  Gathers stay with
NumPy, which copies rows as fast as memory allows (measured: 0.4 ns per element).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from meshmpi.dims import MeshShape
from meshmpi.kernels.native.nest import PARALLEL_POINTS, Unsupported
from meshmpi.kernels.native.scalars import C_TYPES
from meshmpi.program import Instruction, LocalType

_SOURCE = """
  const {t} *updates = p[0];
  const {index} *index = p[1];
  {t} *y = p[2];
  const long first = ((const int64_t *)p[3])[0];
  {parallel}
  {{
    const long n = threads_here(), k = thread_here();
    const long start = {width}L * k / n, stop = {width}L * (k + 1) / n;
    for (long r = 0; r < {rows}; ++r)
      memset(y + r * {width}L + start, 0, (stop - start) * sizeof({t}));
    for (long i = 0; i < {count}; ++i) {{
      const long r = (long)index[i] - first;
      if (r < 0 || r >= {rows}) continue;
      const {t} *u = updates + i * {width}L;
      {t} *total = y + r * {width}L;
      #pragma omp simd
      for (long c = start; c < stop; ++c) total[c] += u[c];
    }}
  }}"""


def scatter_add_body(
    i: Instruction, types: Mapping[int, LocalType], mesh: MeshShape, coordinates: Mapping[str, int]
) -> str:
    """C statements of a scatter_add whose sums are [dim, rest] and whose updates [index, rest].

    Raises:
        Unsupported: Dims in another order, bfloat16 (summed in float32), or an empty block.
    """
    (updates, index), y = [types[v] for v in i.inputs], types[i.outputs[0]]
    rest = y.shape.names[1:]
    if y.shape.names[:1] != (i.attrs["dim"],) or updates.shape.names != (*index.shape.names, *rest):
        raise Unsupported("dims in another order")
    if y.dtype in ("bfloat16", "bool"):
        raise Unsupported("numbers that are summed in another type")
    rows, *others = y.local_sizes(mesh, coordinates)
    width, count = math.prod(others), math.prod(index.local_sizes(mesh, coordinates))
    if not rows * width * count:
        raise Unsupported("an empty block")
    parallel = "#pragma omp parallel" if width * (rows + count) >= PARALLEL_POINTS else ""
    return _SOURCE.format(
        t=C_TYPES[y.dtype], index=C_TYPES[index.dtype], parallel=parallel, width=width, rows=rows,
        count=count,
    )  # fmt: skip


def first_row(i: Instruction, types: Mapping[int, LocalType], mesh: MeshShape,
              coordinates: Mapping[str, int]) -> int:  # fmt: skip
    """The row of the whole table at which the block of the result begins."""
    return types[i.outputs[0]].block(mesh, coordinates)[0][0]
