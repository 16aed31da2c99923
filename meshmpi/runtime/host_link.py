"""How hosts of a job tell each other what their ranks do, beside MPI: one connection to the first.

The lowest rank of every host holds a TCP connection to the lowest rank of the first host.  The
kernels answer for processes that are stopped, so a slow rank closes nothing; a process that dies
closes its end at once; a lost host or link closes it after `SILENT_SECONDS`.  What is told is asked
for, one answer to a question, so that nothing piles up for a process that does not read.

Used by the watchdog's threads only; `connect` alone, which exchanges addresses, calls MPI.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshmpi.runtime import flight
from meshmpi.runtime.rings import Seen, from_json, to_json

if TYPE_CHECKING:
    from mpi4py import MPI

    from meshmpi.runtime.watchdog import Member, Watchdog

SILENT_SECONDS = 12.0
"""A host that has not answered for so long is lost.  Assumption: no switch takes longer to find
another way, and one in five packets may be lost."""
LOOK, GLANCE, STUDY = "look", "glance", "study"
CALLS_TOLD = {LOOK: 64, GLANCE: 8, STUDY: flight.RECORDS}
"""Question -> calls of each rank that one host tells another."""
GLANCE_SECONDS = 5.0
"""While nobody waits, hosts are asked so often: only for calls that differ and yet complete."""
ANSWER_SECONDS = 5.0
"""A host whose watchdog does not answer in this time is not waited for: it may be stopped."""
CONNECT_SECONDS = 20.0
_BYE = "bye"
_LINEAR_RETRIES = 16  # TCP_THIN_LINEAR_TIMEOUTS, which the module socket does not name


def _tuned(connection: socket.socket) -> None:
    """Has the kernel find a lost host, and not give up for some lost packets."""
    s, options = connection, socket.IPPROTO_TCP
    s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    s.setsockopt(options, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        s.setsockopt(options, socket.TCP_KEEPIDLE, 1)
        s.setsockopt(options, socket.TCP_KEEPINTVL, 1)
        s.setsockopt(options, socket.TCP_KEEPCNT, int(SILENT_SECONDS))
        s.setsockopt(options, socket.TCP_USER_TIMEOUT, int(1000 * SILENT_SECONDS))
        s.setsockopt(options, _LINEAR_RETRIES, 1)


class Line:
    """One connection: JSON documents, one a line.

    Attributes:
        closed: Why nothing more comes, or empty.
        left: Whether the other end said good-bye.
    """

    def __init__(self, connection: socket.socket):
        self._socket, self._rest = connection, b""
        self.closed, self.left = "", False
        _tuned(connection)

    def fileno(self) -> int:
        return self._socket.fileno()

    def say(self, document: Any) -> None:
        """Sends; notes in ``closed`` that the other end is lost."""
        try:
            self._socket.sendall(json.dumps(document).encode() + b"\n")
        except OSError as error:
            self.closed = error.strerror or str(error)

    def heard(self, seconds: float) -> Any:
        """The next document; None where none comes in this time or the other end is lost."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._rest and not self.closed:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._socket], [], [], max(0.0, left))
            if not ready:
                return None
            try:
                data = self._socket.recv(1 << 16)
            except OSError as error:
                self.closed = error.strerror or str(error)
                return None
            if not data:
                self.closed = "its end was closed"
            self._rest += data
        line, newline, rest = self._rest.partition(b"\n")
        if not newline:
            return None
        self._rest = rest
        document = json.loads(line)
        if document == _BYE:
            self.left, self.closed = True, "the job is over"
            return None
        return document

    def close(self) -> None:
        """Says good-bye, so that the other end does not take this one for lost."""
        if not self.closed:
            self.say(_BYE)
        self._socket.close()


class HostLink:
    """What the watchdog of one rank knows of other hosts.

    Args:
        lines: Place of a host -> the connection to its lowest rank; on ranks that only answer,
            the one to the first host.
        asks: Whether this is the rank that asks.
    """

    def __init__(self, watchdog: Watchdog, lines: dict[str, Line], asks: bool):
        self._watchdog, self._lines, self.asks = watchdog, lines, asks
        self._last: dict[str, dict[int, Seen]] = {}
        self._asked: dict[str, float] = {}
        self._glanced = time.monotonic()

    def fds(self) -> list[int]:
        """Descriptors that become readable when another host asks, answers or is lost."""
        return [line.fileno() for line in self._lines.values() if not line.closed]

    def exchange(self, own: dict[int, Seen], again: bool = False) -> dict[int, Seen]:
        """What is seen of the ranks of all hosts, on the first; of those of its own on others.

        Args:
            own: What is seen of the ranks of this host.
            again: Whether something is to be confirmed: then all are asked in any case.
        """
        if not self.asks:
            self._answer(own)
            return own | self._lost()
        quiet, now = _quiet(own), time.monotonic()
        if quiet and not again and now - self._glanced < GLANCE_SECONDS:
            self._drain()
            return own | self._lost()
        self._glanced = now
        for place, line in self._lines.items():
            if not line.closed and place not in self._asked:
                line.say(STUDY if again else GLANCE if quiet else LOOK)
                self._asked[place] = now
        for place in list(self._asked):
            self._take(place, 0.5)
        found = self._watchdog.look()  # anew: others have answered since, and calls must overlap
        for seen in self._last.values():
            found |= seen
        return found | self._lost()

    def _drain(self) -> None:
        for place, line in self._lines.items():
            if not line.closed and select.select([line], [], [], 0)[0]:
                self._take(place, 0.0)

    def _take(self, place: str, seconds: float) -> None:
        line = self._lines[place]
        answer = line.heard(seconds)
        if answer is not None:
            self._asked.pop(place, None)
            self._last[place] = {int(r): from_json(s) for r, s in answer["seen"].items()}
        elif line.closed:
            self._asked.pop(place, None)
        elif time.monotonic() - self._asked.get(place, 0.0) > ANSWER_SECONDS:
            self._last.pop(place, None)  # stopped: what it told last is old

    def _lost(self) -> dict[int, Seen]:
        """Ranks of hosts whose connection is closed."""
        found = {}
        hosts = self._watchdog.hosts()
        for place, line in self._lines.items():
            if line.closed and not line.left:
                last = self._last.get(place, {})
                for m in hosts.get(place, []):
                    seen = last.get(m.rank, Seen(m.rank, m.host, m.pid, "gone"))
                    seen.life, seen.why = "gone", f"its host does not answer: {line.closed}"
                    found[m.rank] = seen
        return found

    def _answer(self, own: dict[int, Seen]) -> None:
        for line in self._lines.values():
            while not line.closed and select.select([line], [], [], 0)[0]:
                question = line.heard(0.0)
                if isinstance(question, str):
                    most = CALLS_TOLD[question]
                    line.say({"seen": {r: to_json(s, most) for r, s in own.items()}})
                elif isinstance(question, list):  # ranks whose stacks are wanted
                    self._watchdog.claim()
                    line.say({str(r): t for r, t in self._watchdog.gather_stacks(question).items()})

    def gather_stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Stacks of ranks of other hosts."""
        found: dict[int, str] = {}
        hosts = self._watchdog.hosts() if self.asks else {}
        for place, line in self._lines.items():
            wanted = [m.rank for m in hosts.get(place, []) if m.rank in ranks]
            if wanted and not line.closed and place not in self._asked:
                line.say(wanted)
        for place, line in self._lines.items():
            wanted = [m.rank for m in hosts.get(place, []) if m.rank in ranks]
            if wanted and not line.closed and place not in self._asked:
                answer = line.heard(ANSWER_SECONDS)
                found |= {int(r): t for r, t in (answer or {}).items()}
        return found

    def close(self) -> None:
        """Closes the connections; the job is over."""
        for line in self._lines.values():
            line.close()


def _quiet(own: dict[int, Seen]) -> bool:
    """Whether no rank here waits long: then nothing is asked, and lost packets matter little."""
    return all(
        s.life == "running" and (s.waiting is None or s.waiting.seconds < 2.0) for s in own.values()
    )


def connect(comm: MPI.Intracomm, members: Sequence[Member], watchdog: Watchdog | None) -> None:
    """Connects the lowest ranks of all hosts of a communicator.  Collective; once for its hosts.

    Args:
        comm: The ranks.
        members: They, in the order of the communicator.
        watchdog: That of this rank.
    """
    leads: dict[str, int] = {}
    for number, m in enumerate(members):
        leads.setdefault(m.place, number)
    first, *others = leads.values()
    known = watchdog is not None and watchdog.link is not None
    if any(comm.allgather(known)):  # within hosts that are connected already
        return
    address: tuple[list[str], int, str] | None = None
    server = None
    if comm.rank == first and watchdog is not None:
        server = socket.create_server(("", 0), backlog=len(others) + 8)
        address = (_addresses(), server.getsockname()[1], secrets.token_hex(16))
    address = comm.bcast(address, root=first)
    if address is None or watchdog is None:
        return
    if server is not None:
        wanted = {members[k].place for k in others}
        lines = _accepted(server, wanted, address[2])
        server.close()
        watchdog.link = HostLink(watchdog, lines, True)
    elif comm.rank in others:
        line = _dialled(address, watchdog.me.place)
        lines = {} if line is None else {members[first].place: line}
        watchdog.link = HostLink(watchdog, lines, False)


def _addresses() -> list[str]:
    """Names and numbers under which other hosts may find this one."""
    name = socket.gethostname()
    found = {name: None}
    for family, _, _, _, where in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
        if family == socket.AF_INET and not str(where[0]).startswith("127."):
            found[str(where[0])] = None
    for number in _own_numbers():
        found[number] = None
    return list(found)


def _own_numbers() -> list[str]:
    """IPv4 numbers of the network interfaces, from the kernel's table of local routes."""
    numbers, seen = [], ""
    try:
        with open("/proc/net/fib_trie", encoding="ascii") as file:
            for line in file:
                if "|--" in line:
                    seen = line.split()[-1]
                elif "host LOCAL" in line and not seen.startswith("127.") and seen not in numbers:
                    numbers.append(seen)
    except OSError:  # no Linux
        return []
    return numbers


def _accepted(server: socket.socket, wanted: set[str], token: str) -> dict[str, Line]:
    """Connections by place, of those who know the token."""
    lines: dict[str, Line] = {}
    deadline = time.monotonic() + CONNECT_SECONDS
    while wanted - set(lines) and time.monotonic() < deadline:
        server.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            connection, _ = server.accept()
        except TimeoutError:
            break
        line = Line(connection)
        hello = line.heard(2.0)
        if isinstance(hello, list) and len(hello) == 2 and secrets.compare_digest(hello[0], token):
            lines[hello[1]] = line
            line.say("welcome")
        else:
            line.close()
    for place in sorted(wanted - set(lines)):
        os.write(2, f"meshmpi: host {place.split('|')[0]} has not connected to the first host of"
                    " the job: hangs between hosts are not found.\n".encode())  # fmt: skip
    return lines


def _dialled(address: tuple[list[str], int, str], place: str) -> Line | None:
    """A connection to the first of the addresses that answers and knows the token."""
    numbers, port, token = address
    deadline = time.monotonic() + CONNECT_SECONDS - 2.0
    while time.monotonic() < deadline:
        for number in numbers:
            try:
                line = Line(socket.create_connection((number, port), timeout=3.0))
            except OSError:
                continue
            line.say([token, place])
            if line.heard(3.0) == "welcome":
                return line
            line.close()
        time.sleep(0.2)
    return None
