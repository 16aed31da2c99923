"""A thread of every rank that ends the job when ranks wait for each other and none can continue.

Once a second the lowest rank of each host reads the records of its ranks (`rings`) and of other hosts (`host_link`),
and `deadlock` decides. Threads never call MPI, except to abort.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshmpi.errors import ConfigError, HangError
from meshmpi.files.private import new_file
from meshmpi.guard import deadlock, ending, flight, outcome, stacks
from meshmpi.guard.deadlock import Finding
from meshmpi.guard.rings import Member, Reader, Seen, member
from meshmpi.runtime import processes

if TYPE_CHECKING:
    from meshmpi.guard.host_link import HostLink
    from meshmpi.runtime.mpi import MPI

WAKE_SECONDS = 1.0
BEAT_SECONDS = 3.5
"""A thread that has not run for this long counts as stopped; the next rank of its host looks."""
AGAIN_SECONDS = {"lost": 0.0, "differ": 0.05, "stuck": 1.0, "stalled": 0.0}
"""After this time a finding must be there still: files are read while they are written."""
STACK_SECONDS = 2.5
"""How long the reporting rank waits for the stacks of others: their threads wake once a second."""
PUBLISH_SECONDS = 5.0
"""Between two states of a rank in the folder of its run.  Assumption: 2 KB a rank in this time
is no burden for a file system."""
TURN_SECONDS = 3.0
"""How long other hosts leave it to the first one to report: it knows more."""
_GLANCE = 64  # calls of each rank that are looked at while nothing is wrong
_AT_THE_END = 1 << 15  # calls, of all ranks together, that ranks of several hosts compare
STALL_VARIABLE = "MESHMPI_STALL_SECONDS"
OFF_VARIABLE = "MESHMPI_WATCHDOG"
"""``0`` keeps ranks from being watched; what they do is recorded all the same."""


class Watchdog:
    """The thread and what it knows."""

    def __init__(self, me: Member, ring: flight.Ring, stall_seconds: float | None):
        self.me, self._ring, self._stall = me, ring, stall_seconds
        self._members: dict[int, Member] = {me.rank: me}
        self._readers: dict[int, Reader] = {}
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe()
        self._stopping = False
        self._suspect: tuple[tuple, float] | None = None
        self._claimed_at: float | None = None
        self.handler: Callable[[Finding], bool] | None = None  # decides on a finding; true: the job goes on
        self.link: HostLink | None = None
        self.publish: Callable[[Member, Seen], None] | None = None
        self._published = 0.0
        self._pidfds: dict[int, int] = {}
        self._thread = threading.Thread(target=self._run, name="meshmpi watchdog", daemon=True)
        self._thread.start()

    # ---- who is watched ------------------------------------------------------------------

    def add(self, members: Sequence[Member]) -> None:
        """Watches more ranks."""
        here = [m for m in members if m.place == self.me.place]
        with self._lock:
            for m in members:
                self._members[m.rank] = m
            for m in here:
                if m.ring:
                    self._readers[m.rank] = Reader(Path(m.ring))
        self._ring.beside([(m.pid, m.start) for m in here])
        self._wake()

    def forget(self, ranks: Sequence[int]) -> None:
        """Watches these no more: they are known to be lost, and the others go on without."""
        with self._lock:
            for r in ranks:
                self._members.pop(r, None)
                reader = self._readers.pop(r, None)
                if reader is not None:
                    flight.remove(reader.path)
        self._suspect = None

    def here(self) -> list[Member]:
        """The ranks of this host, ascending."""
        with self._lock:
            return [m for _, m in sorted(self._members.items()) if m.place == self.me.place]

    def hosts(self) -> dict[str, list[Member]]:
        """Place -> its ranks, that of the lowest rank first."""
        with self._lock:
            found: dict[str, list[Member]] = {}
            for _, m in sorted(self._members.items()):
                found.setdefault(m.place, []).append(m)
            return found

    # ---- the thread ----------------------------------------------------------------------

    def stop(self) -> None:
        """Ends the thread; the job has come to its end."""
        self._stopping = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * WAKE_SECONDS if self._claimed_at is None else ending.HARD_SECONDS)
        if self.link is not None:
            self.link.close()

    def _wake(self) -> None:
        os.write(self._wake_write, b"w")

    def _run(self) -> None:
        try:
            self._watch()
        except Exception:  # a fault of the watchdog's own must not end a healthy job
            traceback.print_exc()
            sys.stderr.write(f"meshmpi: rank {self.me.rank} is watched no more, because of the error above.\n")

    def _watch(self) -> None:
        while not self._stopping and not _finalized():
            self._sleep()
            if self._stopping:
                return
            self._ring.beat()
            now = time.monotonic()
            if self.publish is not None and now - self._published >= PUBLISH_SECONDS:
                self._published = now
                self.show()
            if self._claimed_at is not None or self.claim_path().exists():
                self._show_stacks()
            elif self._looks():
                self._judge()

    def show(self) -> None:
        """Has what this rank does published."""
        reader = self._readers.setdefault(self.me.rank, Reader(self._ring.path))
        seen = reader.look(self.me.host, "running", most=16)
        if self.publish is not None and seen is not None:
            self.publish(self.me, seen)

    def _sleep(self) -> None:
        """Up to a second; a process that ends, and `add`, wake it."""
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        linked = [] if self.link is None or self._claimed_at else self.link.fds()
        for fd in [*self._watched(), *linked]:
            poll.register(fd, select.POLLIN)
        wait = WAKE_SECONDS
        if self._suspect is not None:
            wait = min(wait, max(0.02, self._suspect[1] - time.monotonic()))
        for fd, _ in poll.poll(1000 * wait):
            if fd == self._wake_read:
                os.read(fd, 4096)
            elif fd not in linked:
                self._pidfds = {r: f for r, f in self._pidfds.items() if f != fd}
                os.close(fd)

    def _watched(self) -> list[int]:
        """Descriptors that become readable when a process ends: the lead has all of its host."""
        if not hasattr(os, "pidfd_open"):
            return []
        here = self.here()
        wanted = here[1:] if here[0].rank == self.me.rank else here[:1]
        for m in wanted:
            if m.rank not in self._pidfds and processes.state(m.pid, m.start) != "gone":
                with contextlib.suppress(OSError):  # it has just ended: the next look shows it
                    self._pidfds[m.rank] = os.pidfd_open(m.pid)
        return list(self._pidfds.values())

    def _looks(self) -> bool:
        """Whether it is this rank's turn to look at its host."""
        for m in self.here():
            if m.rank >= self.me.rank:
                return True
            reader = self._readers.get(m.rank)
            if reader is None or processes.state(m.pid, m.start) != "running":
                continue
            if time.perf_counter() - reader.heartbeat() < BEAT_SECONDS:
                return False
        return True

    def look(self, most: int = flight.RECORDS) -> dict[int, Seen]:
        """What is seen of the ranks of this host."""
        found = {}
        for m in self.here():
            reader = self._readers.get(m.rank)
            if reader is None:
                continue
            life = processes.state(m.pid, m.start)
            seen = reader.look(m.host, life, most)
            if seen is not None and seen.pid == m.pid:
                found[m.rank] = seen
        return found

    def _judge(self) -> None:
        seen = self.look(_GLANCE if self._suspect is None else flight.RECORDS)
        if self.link is not None:
            seen = self.link.exchange(seen, again=self._suspect is not None)
        finding = deadlock.find(seen, self._stall)
        if finding is None:
            self._suspect = None
            return
        key: tuple = (finding.kind, finding.ranks)
        if finding.kind == "stuck":  # who calls something new is not
            key += tuple(seen[r].count for r in finding.waiting if r in seen)
        now = time.monotonic()
        if self._suspect is None or self._suspect[0] != key:
            self._suspect = (key, now + AGAIN_SECONDS[finding.kind] + self._turn())
        if now >= self._suspect[1]:
            self._found(finding, seen)

    def _turn(self) -> float:
        if self.link is None or self.link.asks:
            return 0.0
        place = list(self.hosts()).index(self.me.place)
        return TURN_SECONDS + min(TURN_SECONDS, 0.25 * place)

    def _found(self, finding: Finding, seen: dict[int, Seen]) -> None:
        if self.handler is not None and self.handler(finding):
            self._suspect = None
            return
        if self.claim():
            self._end(finding, seen)

    # ---- the end -------------------------------------------------------------------------

    def claim_path(self) -> Path:
        """Exists when some rank of this host ends the job."""
        lead = next((m for m in self.here() if m.ring), self.me)
        return Path(lead.ring).with_suffix(".ending")

    def claim(self) -> bool:
        """Claims the end of the job; False where another rank of this host has."""
        self._claimed_at = self._claimed_at or time.monotonic()
        try:
            os.close(new_file(self.claim_path()))
        except FileExistsError:
            return False
        except OSError:  # the folder is gone or full: better two reports than none
            return True
        return True

    def _stacks_path(self, m: Member) -> Path:
        return Path(m.ring).with_suffix(".stacks")

    def _show_stacks(self) -> None:
        """Another rank ends the job: shows where this one is, and sees to it that it ends."""
        if self._claimed_at is None:
            self._claimed_at = time.monotonic()
        path = self._stacks_path(self.me)
        if not path.exists():
            with contextlib.suppress(FileNotFoundError):  # who ends the job has cleaned up already
                stacks.dump(path)
        if time.monotonic() - self._claimed_at > ending.HARD_SECONDS:
            os.kill(os.getpid(), signal.SIGKILL)

    def gather_stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Stacks of those of ``ranks`` that run on this host, as far as they show them in time."""
        stacks.dump(self._stacks_path(self.me))
        wanted = [m for m in self.here() if m.rank in ranks and m.ring]
        deadline = time.monotonic() + STACK_SECONDS
        while time.monotonic() < deadline:
            running = [m for m in wanted if processes.state(m.pid, m.start) == "running"]
            if all(self._stacks_path(m).exists() for m in running):
                break
            time.sleep(0.05)
        found = {}
        for m in wanted:
            with contextlib.suppress(FileNotFoundError):  # stopped, or busy without the interpreter
                found[m.rank] = self._stacks_path(m).read_text(encoding="utf-8", errors="replace")
        return found

    def _end(self, finding: Finding, seen: dict[int, Seen]) -> None:
        outcome.tell(finding.status)  # Slurm may end this rank before it has reported
        if finding.kind == "lost":
            # The launcher kills the others within milliseconds: first what is known at once.
            self._say(finding, seen)
            text = ""
        else:
            text = _report(finding, seen)
        dumps = self.gather_stacks(finding.waiting)
        if self.link is not None:
            dumps |= self.link.gather_stacks(finding.waiting)
        if text:
            text += stacks.shown(dumps)
        else:
            sys.stderr.write(stacks.shown(dumps))
            sys.stderr.flush()
        ending.end_job(text, finding.status, at_once=True, claimed=True)

    def _say(self, finding: Finding, seen: dict[int, Seen]) -> None:
        size = self._ring.size
        sys.stderr.write(f"[rank {self.me.rank} of {size}] {_report(finding, seen)}")
        sys.stderr.flush()

    def last_look(self, comms: Sequence[MPI.Comm]) -> None:
        """All ranks have come to their end: whether they have done the same; ends the job if not.

        Collective, called by main threads while the files of all ranks are still there.
        """
        if len(self.hosts()) == 1:
            if self._looks():
                self._compare(self.look())
            return
        most = max(8, _AT_THE_END // self._ring.size)
        mine = self._readers[self.me.rank].look(self.me.host, "running", most)
        for comm in comms:
            rows = comm.gather(mine)
            if rows is not None:
                self._compare({s.rank: s for s in rows if s is not None})

    def _compare(self, seen: dict[int, Seen]) -> None:
        finding = deadlock.differing(seen)
        if finding is not None:
            self._found(finding, seen)
        if self._claimed_at is not None:  # our own thread or another rank is about to end the job
            time.sleep(ending.HARD_SECONDS)

    def clean(self) -> None:
        """Removes the files of all ranks of this host, but not the claim: the end is not yet."""
        seen = self.look() if self.publish is not None else {}
        for m in self.here():
            if self.publish is not None and m.rank in seen:
                self.publish(m, seen[m.rank])
            if m.ring:
                flight.remove(Path(m.ring))


def _report(finding: Finding, seen: dict[int, Seen]) -> str:
    """The whole message: what is wrong, what to do, and what each rank does."""
    lines = [f"{HangError.__name__}: {finding.problem} {finding.remedy}".rstrip()]
    shown = list(deadlock.grouped((_settled(s), r) for r, s in sorted(seen.items())).items())
    for what, ranks in shown[:12]:
        lines.append(f"  {deadlock.named(ranks)}: {what}")
    if len(shown) > 12:
        lines.append(f"  and {len(shown) - 12} more kinds of states")
    return "\n".join(lines) + "\n"


def _settled(seen: Seen) -> str:
    """What a rank does, without times, so that ranks which do the same stand together."""
    step = f", step {seen.step}" if seen.step is not None else ""
    phase = f" ({seen.phase}{step})" if seen.phase else ""
    call = seen.waiting
    if seen.life == "running" and call:
        return f"waits in {call}, call {call.number} of its group{phase}"
    life = "runs outside of collectives" if seen.life == "running" else seen.life
    after = f", last in {seen.last}, call {seen.last.number}" if seen.last else ""
    return f"{life}{phase}{after}"


def _finalized() -> bool:
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and module.Is_initialized() and module.Is_finalized()


# ---- one for each process ------------------------------------------------------------------

_watchdog: Watchdog | None = None
_numbers = itertools.count()


def current() -> Watchdog | None:
    """The watchdog of this process, if it has one; None in a forked child."""
    return _watchdog if _watchdog is not None and _watchdog.me.pid == os.getpid() else None


def stall_seconds() -> float | None:
    """The user's limit of a wait, or None."""
    text = os.environ.get(STALL_VARIABLE, "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"{STALL_VARIABLE} is '{text}'.", "Give seconds, or 0 for no limit.") from None
    return seconds or None


def join(comm: MPI.Intracomm) -> tuple[str, tuple[int, ...]]:
    """Has the ranks of a communicator watched.  Collective.

    Returns:
        A name of the communicator, unique in the job, and its ranks in MPI.COMM_WORLD.
    """
    from meshmpi.runtime.mpi import MPI

    world, limit = MPI.COMM_WORLD, stall_seconds()
    ring = flight.start(world.rank, world.size)
    me = member(world.rank, ring)
    rows: list[tuple[Member, int]] = comm.allgather((me, next(_numbers)))
    members = [m for m, _ in rows]
    if ring is not None and os.environ.get(OFF_VARIABLE) != "0":
        _start(me, ring, limit).add(members)
    if os.environ.get(OFF_VARIABLE) != "0" and len({m.place for m in members}) > 1:
        from meshmpi.guard import host_link

        found = current()
        link = host_link.connect(comm, members, found, found is not None and found.link is not None)
        if found is not None and link is not None:
            found.link = link
    return f"{members[0].rank}.{rows[0][1]}", tuple(m.rank for m in members)


def alone() -> Watchdog | None:
    """The watchdog of a process that may be the only one: it keeps the status files up to date."""
    ring = flight.start(0, 1)
    return None if ring is None else _start(member(0, ring), ring, None)


def _start(me: Member, ring: flight.Ring, limit: float | None) -> Watchdog:
    global _watchdog
    found = current()
    if found is None:
        _watchdog = found = Watchdog(me, ring, limit)
        ending.settle_with(found)
    return found


def left() -> None:
    """All ranks' programs are over: nothing is watched or kept any more."""
    found, ring = current(), flight.ring()
    if found is not None:
        found.show()
        found.stop()
    if ring is not None:
        ring.remove()
