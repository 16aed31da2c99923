"""Whether a run shall stop now: by a signal to any rank, or before its time is over.

All ranks decide alike, at places that all of them come to.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshmpi.runtime.agreement import Flag, gathered
from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.transformer.training import signals
from meshmpi.transformer.training.limits import TimeLimit


class Interrupted(Exception):
    """The run has been asked to stop; raised on all ranks at the same place.

    Attributes:
        reason: As "SIGTERM on rank 3", or "SIGINT at the launching process".
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Stopping:
    """What asks a run to stop.

    Args:
        mesh: A Mesh, or a SimulatedMesh.
        limit: The time limit; only that of rank 0 counts.

    Attributes:
        limit: The same, to be set where it is known later.
    """

    def __init__(self, mesh: AnyMesh, limit: TimeLimit | None = None) -> None:
        self.limit = limit or TimeLimit()
        self._mesh, self._flag = mesh, Flag(mesh)
        self._reason = ""

    def asked(self) -> str:
        """Why the run shall stop, or empty.  Collective, one small all-reduce."""
        if self._reason:
            return self._reason
        mine = signals.noted() or (self.limit.reached() if self._mesh.rank == 0 else "")
        if not self._flag.agree(bool(mine)):
            return ""
        self._reason = _reason(gathered(self._mesh, signals.described() or mine))
        return self._reason

    def check(self) -> None:
        """Raises Interrupted when the run shall stop.  Collective."""
        reason = self.asked()
        if reason:
            raise Interrupted(reason)

    def took(self, *, step: float = 0.0, save: float = 0.0) -> None:
        """Notes how long a step or a save took, in seconds: so much must be left at the end."""
        self.limit.took(step=step, save=save)


def _reason(reasons: Sequence[str]) -> str:
    """The reason of the launching process, or of the first rank that has one."""
    launching = next((reason for reason in reasons if reason.endswith(signals.AT_LAUNCH)), "")
    if launching:
        return launching
    rank = next(r for r, reason in enumerate(reasons) if reason)
    by_signal = len(reasons) > 1 and reasons[rank].startswith("SIG")
    return reasons[rank] + (f" on rank {rank}" if by_signal else "")
