"""What the speed of meshmpi is held against: one line for each goal, read from the tables of a run.

A goal is an upper limit of a figure that another part of the bench measured; a part that did not
run leaves its goals open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from apps.bench.tables import Cell, Table

Tables = Mapping[str, Table]
Found = tuple[float, str] | None
"""A figure, and what it is the figure of; None where nothing was measured."""
OPENBLAS = "meshmpi data-parallel, openblas"
NOISE = 1.05
"""Two runs of the same loop differ by as much.  Status: assumption."""


class Goal(NamedTuple):
    """One goal.

    Attributes:
        what: The figure, with its unit.
        limit: Which it must not exceed, or what gives the limit in the same run.
        find: The tables of a run, by name -> the figure.
    """

    what: str
    limit: float | Callable[[Tables], Found]
    find: Callable[[Tables], Found]


def _cells(tables: Tables, name: str, column: str) -> list[tuple[str, Cell]]:
    """(first cell, cell below ``column``) of each row of a table that may not be there."""
    table = tables.get(name)
    if table is None or column not in table.columns:
        return []
    return [(str(row[0]), cell) for row, cell in zip(table.rows, table.column(column), strict=True)]


def _numbers(cells: Iterable[tuple[str, Cell]], begins: str = "") -> list[tuple[float, str]]:
    return [(float(cell), row) for row, cell in cells if isinstance(cell, (int, float)) and row.startswith(begins)]


def _most(name: str, column: str, begins: str = "") -> Callable[[Tables], Found]:
    """The greatest figure of the rows whose first cell begins so."""
    return lambda tables: max(_numbers(_cells(tables, name, column), begins), default=None)


def _step(row: str) -> Callable[[Tables], Found]:
    """Step over bare products of the fastest system whose name begins so, or is that."""

    def find(tables: Tables) -> Found:
        cells = _cells(tables, "step", "step / bare products")
        return min(_numbers((r, c) for r, c in cells if r.startswith(row)), default=None)

    return find


def _only(row: str, column: str = "step / bare products") -> Callable[[Tables], Found]:
    def find(tables: Tables) -> Found:
        cells = _cells(tables, "step", column)
        return min(_numbers((r, c) for r, c in cells if r == row), default=None)

    return find


def _on_openblas(tables: Tables) -> Found:
    """The step with OpenBLAS, which is the ordinary one where meshmpi prefers it."""
    found = _only(OPENBLAS, "ms per step")(tables)
    bare = [row for row, _ in _cells(tables, "step", "ms per step")][:1]
    if found is None and bare and "openblas" in bare[0]:
        return _only("meshmpi data-parallel", "ms per step")(tables)
    return found


def _fastest_peer(tables: Tables) -> Found:
    cells = _cells(tables, "step", "ms per step")
    return min(_numbers(((r, c) for r, c in cells if "bfloat16" not in r), "PyTorch"), default=None)


def _slowest_collective(tables: Tables) -> Found:
    table = tables.get("collectives")
    if table is None:
        return None
    ratios = zip(table.rows, table.column("meshmpi / best mpi4py"), strict=True)
    found = [(float(x), f"{row[0]} of {row[1]:,} bytes") for row, x in ratios if isinstance(x, (int, float))]
    return max(found, default=None)


def _growth(tables: Tables) -> Found:
    """The largest ratio of time per instruction in a family of programs, which are listed by size."""
    families: dict[str, list[float]] = {}
    for seconds, family in _numbers(_cells(tables, "lowering", "per 10,000 lowered")):
        families.setdefault(family, []).append(seconds)
    return max(((found[-1] / found[0], family) for family, found in families.items()), default=None)


GOALS = (
    Goal("float32, data-parallel: step / bare products", 1.10, _only("meshmpi data-parallel")),
    Goal("float32, model-parallel: step / bare products", 1.20, _only("meshmpi model-parallel")),
    Goal("bfloat16: step / bare products", 0.42, _step("meshmpi data-parallel, bfloat16")),
    Goal("with OpenBLAS: ms per step, against PyTorch's best in float32", _fastest_peer, _on_openblas),
    Goal(
        "peak MB per process, float32",
        700,
        lambda tables: max(
            filter(
                None,
                (_only(f"meshmpi {layout}-parallel", "peak MB per process")(tables) for layout in ("data", "model")),
            ),
            default=None,
        ),
    ),
    Goal("slowest generated loop / plain C", NOISE, _most("loops", "meshmpi / plain C")),
    Goal("slowest collective / the best call of mpi4py", 1.2, _slowest_collective),
    Goal("calling the instructions, % of the step", 2, _most("overhead share", "% of the step")),
    Goal("ms per step of 300 tiny instructions", 3, _most("overhead", "ms per step", "native")),
    Goal("lowering and passes, s", 1, _most("planning", "lowering and passes")),
    Goal("compiling 10,000 lowered instructions, processor s", 1, _most("lowering", "per 10,000 lowered")),
    Goal("per instruction: the longest program / the shortest of its family", 1.2, _growth),
    Goal("plan of 96 layers, processor s", 8, _most("deep plans", "plan")),
    Goal("plan of 96 layers, peak MB", 400, _most("deep plans", "peak MB")),
    Goal("cold build of kernels, s", 20, _most("planning", "cold build of kernels")),
    Goal("warm start to a step that is ready, s", 2, _most("start", "warm", "ready")),
)


def table(made: Sequence[Table]) -> Table:
    """A line for each goal: the limit, what was measured, and whether it is met.

    Args:
        made: All tables of the run.
    """
    known = {t.name: t for t in made}
    rows: list[list[Cell]] = []
    for goal in GOALS:
        found = goal.find(known)
        limit = goal.limit(known) if callable(goal.limit) else (float(goal.limit), "")
        if found is None or limit is None:
            rows.append([goal.what, limit and limit[0], found and found[0], "not measured", None])
            continue
        of = f"{found[1]} against {limit[1]}" if limit[1] else found[1]
        rows.append([goal.what, limit[0], found[0], "yes" if found[0] <= limit[0] else "**no**", of])
    columns = ("goal", "at most", "measured", "met", "of")
    return Table("goals", "Goals", columns, rows)
