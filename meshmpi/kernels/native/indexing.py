"""C source of scatter_add and top_k.

Of a scatter_add every thread adds all updates to batches or columns of its own, of a top_k it ranks
rows of its own; so results do not depend on the number of threads, and rows need not be sorted.
Gathers stay with NumPy, which copies rows as fast as memory allows (measured: 0.4 ns per element).
"""

from __future__ import annotations

import math

from meshmpi.ir.kinds import ScatterAdd, TopK
from meshmpi.kernels.native.nest import PARALLEL_POINTS, Site, Unsupported
from meshmpi.kernels.native.scalars import C_TYPES

_SOURCE = """
  const {t} *updates = p[0];
  const {index} *index = p[1];
  {t} *y = p[2];
  const long first = ((const int64_t *)p[3])[0];
  {parallel}
  {{
    const long n = threads_here(), k = thread_here();
    const long start = {columns[0]}, stop = {columns[1]};
    for (long b = {batch[0]}; b < {batch[1]}; ++b) {{
      const {t} *block = updates + b * {count} * {width}L;
      const {index} *where = index + b * {count};
      {t} *here = y + b * {rows} * {width}L;
      for (long r = 0; r < {rows}; ++r)
        memset(here + r * {width}L + start, 0, (stop - start) * sizeof({t}));
      for (long i = 0; i < {count}; ++i) {{
        const long r = (long)where[i] - first;
        if (r < 0 || r >= {rows}) continue;
        const {t} *u = block + i * {width}L;
        {t} *total = here + r * {width}L;
        #pragma omp simd
        for (long c = start; c < stop; ++c) total[c] += u[c];
      }}
    }}
  }}"""


def scatter_add_body(site: Site) -> str:
    """C statements of a scatter_add of updates [batch, index, rest] into sums [batch, dim, rest].

    Threads share the batches, or the columns where there is one batch only.
    """
    i = site.instruction
    (updates, index), y = [site.types[v] for v in i.inputs], site.types[i.outputs[0]]
    at = y.shape.position(i.of(ScatterAdd).dim)
    batch, rest = y.shape.names[:at], y.shape.names[at + 1 :]
    leads = index.shape.names[:at] == batch and not set(index.shape.names[at:]) & set(rest)
    if not leads or updates.shape.names != (*index.shape.names, *rest):
        raise Unsupported("dims in another order")
    if y.dtype in ("bfloat16", "bool") or i.of(ScatterAdd).checked:
        raise Unsupported("numbers that are summed in another type, or a check of the index")
    sizes = list(site.sizes(i.outputs[0]).values())
    batches, rows, width = math.prod(sizes[:at]), sizes[at], math.prod(sizes[at + 1 :])
    count = math.prod(list(site.sizes(i.inputs[1]).values())[at:])
    if not batches * rows * width * count:
        raise Unsupported("an empty block")
    pays = batches * width * (rows + count) >= PARALLEL_POINTS

    def span(count: int, shared: bool) -> tuple[str, str]:
        """Where the part of a thread begins and ends."""
        return (f"{count}L * k / n", f"{count}L * (k + 1) / n") if shared else ("0", str(count))

    columns, batch_range = span(width, batches == 1), span(batches, batches > 1)
    return _SOURCE.format(
        t=C_TYPES[y.dtype],
        index=C_TYPES[index.dtype],
        width=width,
        rows=rows,
        count=count,
        parallel="#pragma omp parallel" if pays else "",
        columns=columns,
        batch=batch_range,
    )


MOST_RANKED = 128
"""Elements that a top_k in C keeps in order; the NumPy kernel sorts faster from here on.  Status:
assumption."""
_RANKING = """
  const {t} *x = p[0];
  {given}
  {t} *values = p[{inputs}];
  int32_t *index = p[{inputs} + 1];
  const long first = ((const int64_t *)p[{inputs} + 2])[0];
  {parallel}
  {{
    const long n = threads_here(), t = thread_here();
    for (long r = {rows}L * t / n; r < {rows}L * (t + 1) / n; ++r) {{
      const {t} *row = x + r * {length}L;
      {t} best[{k}];
      long place[{k}], held = 0;
      for (long i = 0; i < {length}L; ++i) {{
        const {t} v = row[i];
        if (held == {k} && !BEFORE(v, best[{k} - 1])) continue;
        long j = held < {k} ? held++ : {k} - 1;
        for (; j > 0 && BEFORE(v, best[j - 1]); --j) best[j] = best[j - 1], place[j] = place[j - 1];
        best[j] = v, place[j] = i;
      }}
      for (long j = 0; j < {k}; ++j) {{
        values[r * {k} + j] = best[j];
        index[r * {k} + j] = {source};
      }}
    }}
  }}"""


def top_k_body(site: Site) -> str:
    """C statements of a top_k along the innermost dim: one pass over each row.

    The best so far are kept in order, so that most elements cost one comparison.
    """
    i = site.instruction
    x, y, attrs = site.types[i.inputs[0]], site.types[i.outputs[0]], i.of(TopK)
    if x.shape.names[-1] != attrs.dim or y.shape.names[:-1] != x.shape.names[:-1]:
        raise Unsupported("a ranking along a dim that is not the innermost")
    k, sizes = site.sizes(i.outputs[0])[attrs.k], list(site.sizes(i.inputs[0]).values())
    if x.dtype not in ("float32", "float64", "int32", "int64") or not 1 <= k <= MOST_RANKED:
        raise Unsupported("a ranking of another type, or of many elements")
    if not math.prod(sizes):
        raise Unsupported("an empty block")
    sign = "<" if attrs.smallest else ">"
    late, early = ("b", "a") if attrs.smallest else ("a", "b")  # NaN is the largest
    before = f"((a) {sign} (b) || (({late}) != ({late}) && ({early}) == ({early})))"
    given = len(i.inputs) > 1
    body = _RANKING.format(
        t=C_TYPES[x.dtype],
        inputs=len(i.inputs),
        k=k,
        rows=math.prod(sizes[:-1]),
        length=sizes[-1],
        given="const int32_t *given = p[1];" if given else "",
        parallel="#pragma omp parallel" if math.prod(sizes) >= PARALLEL_POINTS else "",
        source=f"given[r * {sizes[-1]}L + place[j]]" if given else "(int32_t)(first + place[j])",
    )
    return f"\n#undef BEFORE\n#define BEFORE(a, b) {before}\n{body}"
