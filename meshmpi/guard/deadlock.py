"""Decides from the recorded state of all ranks whether they wait for each other and none can continue.

A rank that computes, reads a file or is stopped by a debugger is slow, not stuck. A job is stuck if ranks wait for
calls that no rank can make any more. Pure reasoning over `rings.Seen`: no files, no MPI, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from meshmpi.guard.exit_status import LOST
from meshmpi.guard.flight import OTHER, UNKNOWN_STATUS
from meshmpi.guard.rings import Call, Seen

T = TypeVar("T")


CALL_THE_SAME = (
    "Every rank of a group must call the same collectives in the same order, with the same sizes, data type and"
    " operation."
)


class Finding(NamedTuple):
    """Why a job cannot go on."""

    kind: str  # lost, differ, stuck or stalled
    problem: str  # what is wrong: one sentence
    ranks: tuple[int, ...]  # those it is about, ascending
    waiting: tuple[int, ...]  # ranks that wait in a collective
    remedy: str = ""  # what to do, or empty
    status: int = 1  # exit status for the job


def find(ranks: Mapping[int, Seen], stall_seconds: float | None = None) -> Finding | None:
    """The gravest thing that is wrong, or None."""
    return lost(ranks) or differing(ranks) or stuck(ranks) or (stalled(ranks, stall_seconds) if stall_seconds else None)


def _waiting(ranks: Mapping[int, Seen]) -> tuple[int, ...]:
    return tuple(r for r, s in sorted(ranks.items()) if s.waiting and s.life != "gone")


def lost(ranks: Mapping[int, Seen]) -> Finding | None:
    """Processes that are gone without having left the program."""
    gone = tuple(r for r, s in sorted(ranks.items()) if s.life == "gone")
    if not gone:
        return None
    what = f"the process of {named(gone)} is" if len(gone) == 1 else f"those of {named(gone)} are"
    places = dict.fromkeys(
        f"host {s.host}" + (f", pid {s.pid}" if len(gone) <= 4 else "") + (f": {s.why}" if s.why else "")
        for s in (ranks[r] for r in gone)
    )
    remedy = (
        "Look at that host and its network; start again from the last checkpoint."
        if all(ranks[r].why for r in gone)
        else "It was killed from outside, for want of memory (see dmesg) or by a crash, or it"
        " called os._exit; start again from the last checkpoint."
    )
    problem = f"{what} gone without a message ({'; '.join(places)})."
    return Finding("lost", problem, gone, _waiting(ranks), remedy, LOST)


def differing(ranks: Mapping[int, Seen]) -> Finding | None:
    """The first call of a communicator that is not the same on all its ranks."""
    for group in dict.fromkeys(g for _, s in sorted(ranks.items()) for g in s.members):
        finding = _first_difference(ranks, group) or _old_difference(ranks, group)
        if finding is not None:
            return finding
    return None


def _first_difference(ranks: Mapping[int, Seen], group: str) -> Finding | None:
    calls: dict[int, dict[int, Call]] = {}
    for r, s in sorted(ranks.items()):
        for c in s.calls:
            if c.group == group and c.kind.kind != OTHER:  # may be any; `_old_difference` has its digest
                calls.setdefault(c.number, {})[r] = c
    for number, of_ranks in sorted(calls.items()):
        sides = list(grouped((c.kind, r) for r, c in of_ranks.items()).values())
        if len(sides) > 1:
            told = "; ".join(f"{named(side, 'call')} {of_ranks[side[0]]}" for side in sides)
            return Finding(
                "differ",
                f"ranks of one group call different collectives, as their call {number}: {told}.",
                _fewest(sides),
                _waiting(ranks),
                CALL_THE_SAME,
            )
    return None


def _old_difference(ranks: Mapping[int, Seen], group: str) -> Finding | None:
    """The same where the record of the call has been overwritten."""
    digests: dict[int, dict[int, int]] = {}
    for r, s in sorted(ranks.items()):
        found = {c.number: c.digest for c in s.calls if c.group == group}
        if group in s.reached:
            found.setdefault(*s.reached[group])
        for number, digest in found.items():
            digests.setdefault(number, {})[r] = digest
    for number, of_ranks in sorted(digests.items()):
        sides = list(grouped((digest, r) for r, digest in of_ranks.items()).values())
        if len(sides) > 1:
            told = "; ".join(f"{named(side)} last called {ranks[side[0]].last}" for side in sides)
            return Finding(
                "differ",
                f"ranks of one group have called different collectives at or before call {number}: {told}.",
                _fewest(sides),
                _waiting(ranks),
                "The record of that call has been overwritten, or it is one of too many kinds;"
                " MESHMPI_DEBUG=collectives stops at it.",
            )
    return None


def _fewest(sides: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The smallest side, or all ranks where no side is larger than another."""
    odd = min(sides, key=len)
    return tuple(odd) if len(odd) < max(map(len, sides)) else tuple(sorted(r for side in sides for r in side))


def stuck(ranks: Mapping[int, Seen]) -> Finding | None:
    """Ranks that wait for calls which no rank is left to make."""
    hopeless = _hopeless(ranks)
    if not hopeless:
        return None
    behind = sorted({p for r in hopeless for p in missing(ranks, r)})
    left = [p for p in behind if ranks[p].life == "left"]
    told = "; ".join(f"{named(members, 'wait')} in {what}" for what, members in _by_call(ranks, hopeless).items())
    if left:
        status = ranks[left[0]].status
        how = "" if status in (None, UNKNOWN_STATUS) else f" by exit status {status}"
        before = ranks[left[0]].last
        after = f", after {before}" if before else ", before any collective"
        problem = f"{named(left)} left the program{how} while other ranks still run{after}: {told}."
        status = 1 if status in (None, 0, UNKNOWN_STATUS) else status
        return Finding(
            "stuck",
            problem,
            tuple(left),
            tuple(hopeless),
            "All ranks must come to the same collectives: look for a return, an exit or a caught"
            " exception that only some ranks meet.",
            status,
        )
    return Finding(
        "stuck",
        f"ranks wait for each other in different collectives: {told}.",
        tuple(behind or hopeless),
        tuple(hopeless),
        "Every rank must call the collectives that it shares with others in the same order.",
    )


def _by_call(ranks: Mapping[int, Seen], members: Iterable[int]) -> dict[str, list[int]]:
    """What ranks wait in -> the ranks."""
    waits = ((ranks[r].waiting, r) for r in members)
    return grouped((f"{call}, their call {call.number}", r) for call, r in waits if call is not None)


def missing(ranks: Mapping[int, Seen], rank: int) -> list[int]:
    """Ranks that have not come to the call in which ``rank`` waits."""
    call = ranks[rank].waiting
    if call is None:
        return []
    return [
        p
        for p in ranks[rank].members.get(call.group, ())
        if p in ranks and ranks[p].reached.get(call.group, (0, 0))[0] < call.number
    ]


def _hopeless(ranks: Mapping[int, Seen]) -> list[int]:
    """The ranks that wait and whose wait no running rank can end, directly or through others."""
    waits = {r: missing(ranks, r) for r, s in sorted(ranks.items()) if s.waiting}
    moving = {r for r, s in ranks.items() if r not in waits and s.life in ("running", "stopped")}
    while True:
        more = [r for r in waits if r not in moving and all(p in moving for p in waits[r])]
        if not more:
            return [r for r in waits if r not in moving and ranks[r].life != "gone"]
        moving.update(more)


def stalled(ranks: Mapping[int, Seen], seconds: float) -> Finding | None:
    """Ranks that have waited longer than the user allows, for whatever reason."""
    late = [r for r, s in sorted(ranks.items()) if s.waiting and s.waiting.seconds > seconds]
    if not late:
        return None
    told = "; ".join(f"{named(members)} in {what}" for what, members in _by_call(ranks, late).items())
    behind = sorted({p for r in late for p in missing(ranks, r)} - set(late))
    for_whom = "; ".join(f"rank {p}, which is {doing(ranks[p])}" for p in behind[:4])
    return Finding(
        "stalled",
        f"ranks have waited longer than {seconds:g} s: {told}" + (f"; they wait for {for_whom}." if for_whom else "."),
        tuple(behind or late),
        tuple(late),
        "Set MESHMPI_STALL_SECONDS higher, or to 0 for no limit, if such a long wait is intended.",
    )


def doing(seen: Seen) -> str:
    """What a rank does, in words."""
    if seen.life in ("gone", "left", "stopped"):
        return seen.life
    step = f", step {seen.step}" if seen.step is not None else ""
    phase = f" ({seen.phase}{step}, {seen.phase_seconds:.0f} s)" if seen.phase else ""
    if seen.waiting:
        return f"waiting {seen.waiting.seconds:.1f} s in {seen.waiting}{phase}"
    return f"running outside of collectives{phase}" + (f", after {seen.last}" if seen.last else "")


def named(ranks: Sequence[int], verb: str = "") -> str:
    """``rank 1`` or ``ranks 0-2,5``; with a verb ``rank 1 waits`` or ``ranks 0-2,5 wait``."""
    runs: list[list[int]] = []
    for r in sorted(ranks):
        if runs and runs[-1][-1] == r - 1:
            runs[-1] = [runs[-1][0], r]
        else:
            runs.append([r])
    text = ",".join("-".join(map(str, run)) for run in runs)
    several = len(ranks) > 1
    says = f" {verb}{'' if several else 's'}" if verb else ""
    return f"rank{'s' if several else ''} {text}{says}"


def grouped(found: Iterable[tuple[T, int]]) -> dict[T, list[int]]:
    """What was found of ranks -> the ranks of which it was found, in the order given."""
    groups: dict[T, list[int]] = {}
    for what, rank in found:
        groups.setdefault(what, []).append(rank)
    return groups
