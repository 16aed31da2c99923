"""Debug mode: before every collective its ranks tell each other what they are about to do.

Ranks that would do different things raise the same error then, on all of them, in place of wrong
numbers, a hang or a damaged heap.  It costs a message to all for every collective.  Ranks that are
in different communicators cannot tell each other; that is found by the watchdog.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from meshmpi.errors import ConfigError, ProgramError, suggest
from meshmpi.guard.deadlock import named
from meshmpi.runtime.calls import CallKind

if TYPE_CHECKING:
    from meshmpi.runtime.mpi import MPI

T = TypeVar("T")
DEBUG_VARIABLE = "MESHMPI_DEBUG"
MODES = ("collectives",)
FIELDS = ("kind", "op", "dtype", "axes", "elements", "shape", "about")
_SAID = {"op": "operation", "dtype": "data type", "axes": "order of axes", "about": "instruction"}


def wanted() -> bool:
    """Whether MESHMPI_DEBUG asks for it.

    Raises:
        ConfigError: It asks for something else.
    """
    modes = [m.strip() for m in os.environ.get(DEBUG_VARIABLE, "").split(",") if m.strip()]
    for mode in modes:
        if mode not in MODES:
            raise ConfigError(f"{DEBUG_VARIABLE} names '{mode}'.", suggest(mode, MODES))
    return "collectives" in modes


def checked(
    comm: MPI.Intracomm, members: Sequence[int], kind: CallKind, line: str, run: Callable[[], T]
) -> Callable[[], T]:
    """``run``, before which the ranks of ``comm`` compare what they do.

    Args:
        comm: The collective's communicator.
        members: Its ranks in MPI.COMM_WORLD.
        kind: What this rank does.
        line: ``file:line`` of the user's code.
        run: Does it.

    Raises:
        ProgramError: When called, on all ranks alike, if they differ.
    """
    mine = (kind, line)

    def check_and_run() -> T:
        given = comm.allgather(mine)
        if any(k != given[0][0] for k, _ in given):
            raise _difference([CallKind(*k) for k, _ in given], [at for _, at in given], members)
        return run()

    return check_and_run


def _difference(kinds: Sequence[CallKind], lines: Sequence[str], members: Sequence[int]) -> Exception:
    groups: dict[tuple[CallKind, str], list[int]] = {}
    for kind, line, rank in zip(kinds, lines, members, strict=True):
        groups.setdefault((kind, line), []).append(rank)
    first = kinds[0]
    names = [f for f in FIELDS if any(getattr(k, f) != getattr(first, f) for k in kinds)]
    what = "kind" if "kind" in names else ", ".join(_SAID.get(n, n) for n in names)
    told = "; ".join(
        f"{named(ranks)}: {shown(kind)}{f' at {line}' if line else ''}" for (kind, line), ranks in groups.items()
    )
    return ProgramError(
        f"ranks of one group call collectives of different {what}: {told}.",
        "Every rank of a group must call the same collectives in the same order, with the same"
        " sizes, data type and operation.",
    )


def shown(kind: CallKind) -> str:
    """A collective in words, as ``all_reduce(sum, float32, 1000) over rows``."""
    inside = ", ".join(x for x in (kind.op, kind.dtype, kind.shape) if x)
    return f"{kind.kind}({inside})" + (f" over {kind.axes}" if kind.axes else "")
