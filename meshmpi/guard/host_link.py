"""Exchanges the state of ranks between hosts without MPI: the lowest rank of each host connects to the first host.

Both ends prove that they know a secret of the job before anything is parsed. A stopped process keeps its connection;
the end of a process closes it at once, and a lost host or link closes it after `SILENT_SECONDS`. Every answer is
requested.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from meshmpi.guard import flight
from meshmpi.guard.line import Line
from meshmpi.guard.rings import Host, Member, Seen, from_json, to_json

if TYPE_CHECKING:
    from meshmpi.runtime.mpi import MPI


LOOK, GLANCE, STUDY = "look", "glance", "study"
CALLS_TOLD = {LOOK: 64, GLANCE: 8, STUDY: flight.RECORDS}
"""Question -> calls of each rank that one host tells another."""
GLANCE_SECONDS = 5.0
"""While nobody waits, hosts are asked so often: only for calls that differ and yet complete."""
ANSWER_SECONDS = 5.0
"""A host whose watchdog does not answer in this time is not waited for: it may be stopped."""
CONNECT_SECONDS = 20.0
GUEST_SECONDS = 4.0
"""A connection that has not proved by then where it comes from is closed."""
MOST_GUESTS = 256
"""Connections that may prove it at the same time; the oldest gives way to the next."""
BACKLOG = 4096
"""Connections that the kernel keeps until they are accepted; one that it drops waits a second."""
NONCE_BYTES, PROOF_BYTES = 16, 32
_HELLO_BYTES = NONCE_BYTES + PROOF_BYTES
NOT_UNDERSTOOD = (ValueError, LookupError, TypeError, AttributeError)
"""What parsing a document raises that is none of ours."""


class HostLink:
    """What the watchdog of one rank knows of other hosts."""

    def __init__(self, host: Host, lines: dict[str, Line], asks: bool):
        self._host, self._lines, self.asks = host, lines, asks
        self._last: dict[str, dict[int, Seen]] = {}
        self._asked: dict[str, float] = {}
        self._glanced = time.monotonic()

    def fds(self) -> list[int]:
        """Descriptors that become readable when another host asks, answers or is lost."""
        return [line.fileno() for line in self._lines.values() if not line.closed]

    def exchange(self, own: dict[int, Seen], again: bool = False) -> dict[int, Seen]:
        """What is seen of the ranks of all hosts, on the first; of those of its own on others."""
        if not self.asks:
            self._answer(own)
            return own | self._lost()
        quiet, now = _quiet(own), time.monotonic()
        if quiet and not again and now - self._glanced < GLANCE_SECONDS:
            for place, line in self._lines.items():
                if not line.closed and line.ready():
                    self._take(place, 0.0)
            return own | self._lost()
        self._glanced = now
        for place, line in self._lines.items():
            if not line.closed and place not in self._asked:
                line.say(STUDY if again else GLANCE if quiet else LOOK)
                self._asked[place] = now
        for place in list(self._asked):
            self._take(place, 0.5)
        found = self._host.look()  # anew: others have answered since, and calls must overlap
        for seen in self._last.values():
            found |= seen
        return found | self._lost()

    def _take(self, place: str, seconds: float) -> None:
        line = self._lines[place]
        answer = line.heard(seconds)
        if answer is not None:
            self._asked.pop(place, None)
            try:
                self._last[place] = {int(r): from_json(s) for r, s in answer["seen"].items()}
            except NOT_UNDERSTOOD as error:
                line.refuse(f"no states of ranks ({error})")
        elif line.closed:
            self._asked.pop(place, None)
        elif time.monotonic() - self._asked.get(place, 0.0) > ANSWER_SECONDS:
            self._last.pop(place, None)  # stopped: what it told last is old

    def _lost(self) -> dict[int, Seen]:
        """Ranks of hosts whose connection is closed."""
        found = {}
        hosts = self._host.hosts()
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
            while not line.closed and line.ready():
                question = line.heard(0.0)
                if question is None:  # not yet whole: the rest wakes the watchdog again
                    break
                if isinstance(question, str) and question in CALLS_TOLD:
                    most = CALLS_TOLD[question]
                    line.say({"seen": {r: to_json(s, most) for r, s in own.items()}})
                elif isinstance(question, list):  # ranks whose stacks are wanted
                    self._host.claim()
                    line.say({str(r): t for r, t in self._host.gather_stacks(question).items()})
                else:
                    line.refuse(f"no question ({question})")

    def gather_stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Stacks of ranks of other hosts."""
        found: dict[int, str] = {}
        hosts = self._host.hosts() if self.asks else {}
        asked = []
        for place, line in self._lines.items():
            wanted = [m.rank for m in hosts.get(place, []) if m.rank in ranks]
            if wanted and not line.closed and place not in self._asked:
                line.say(wanted)
                asked.append(line)
        for line in asked:  # one that is lost by now answers nothing
            try:
                found |= {int(r): str(t) for r, t in (line.heard(ANSWER_SECONDS) or {}).items()}
            except NOT_UNDERSTOOD as error:
                line.refuse(f"no stacks ({error})")
        return found

    def close(self) -> None:
        """Closes the connections; the job is over."""
        for line in self._lines.values():
            line.close()


def _quiet(own: dict[int, Seen]) -> bool:
    return all(s.life == "running" and (s.waiting is None or s.waiting.seconds < 2.0) for s in own.values())


def connect(comm: MPI.Intracomm, members: Sequence[Member], host: Host | None, linked: bool) -> HostLink | None:
    """Connects the lowest ranks of all hosts of a communicator.  Collective; once for its hosts.

    ``members`` are in the order of the communicator; ``linked``: this rank has a link already.
    """
    leads: dict[str, int] = {}
    for number, m in enumerate(members):
        leads.setdefault(m.place, number)
    first, *others = leads.values()
    if any(comm.allgather(linked)):  # within hosts that are connected already
        return None
    leading = comm.rank in leads.values() and host is not None
    numbers = comm.gather(_own_numbers() if leading else [], root=first)
    told: tuple[list[Address], dict[str, bytes]] | None = None
    servers: list[socket.socket] = []
    if comm.rank == first and host is not None and numbers is not None:
        servers = _listening(sorted({n for k in others for n in numbers[k]}))
        tokens = {members[k].place: secrets.token_bytes(32) for k in others}
        told = _addresses(servers), tokens
    told = comm.bcast(told, root=first)
    if told is None or host is None:
        return None
    if servers:
        return HostLink(host, _accepted(servers, told[1]), True)
    if comm.rank in others:
        line = _dialled(told[0], told[1][host.me.place])
        return HostLink(host, {} if line is None else {members[first].place: line}, False)
    return None


Address = tuple[str, int]
"""Name or number of a host, and a port."""


def _listening(others: Sequence[str]) -> list[socket.socket]:
    """Servers on those addresses of this host by which it reaches the others, and no more."""
    own, needed = _own_numbers(), dict[str, None]()
    for number in others:
        if number not in own:  # else a bridge that each host has, or hosts that are one machine
            with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
                probe.connect((number, 9))  # sends nothing: the kernel looks for the way
                needed[probe.getsockname()[0]] = None
    servers = []
    for number in needed or own:
        with contextlib.suppress(OSError):  # an interface that has just gone
            servers.append(socket.create_server((number, 0), backlog=BACKLOG))
    return servers or [socket.create_server(("", 0), backlog=BACKLOG)]


def _addresses(servers: Sequence[socket.socket]) -> list[Address]:
    bound = [s.getsockname()[:2] for s in servers]
    name = socket.gethostname()
    return [*(b for b in bound if b[0] != "0.0.0.0"), *((name, port) for _, port in bound)]


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


class _Guest:
    """A connection that has yet to prove that it is of the job."""

    def __init__(self, connection: socket.socket):
        self.connection, self.data = connection, b""
        self.nonce, self.until = secrets.token_bytes(NONCE_BYTES), time.monotonic() + GUEST_SECONDS
        connection.setblocking(False)

    def more(self) -> bool:
        """Takes in what has come; whether that, or the other end, is complete."""
        try:
            data = self.connection.recv(_HELLO_BYTES - len(self.data))
        except BlockingIOError:
            return False
        except OSError:
            return True
        self.data += data
        return not data or len(self.data) == _HELLO_BYTES

    def place(self, tokens: Mapping[str, bytes]) -> str:
        """Which host it has proved to be, or empty."""
        other, proof = self.data[:NONCE_BYTES], self.data[NONCE_BYTES:]
        found = ""
        for place, token in tokens.items():  # all of them, so that the time taken tells nothing
            if hmac.compare_digest(proof, _proof(token, b"dial", self.nonce, other)):
                found = place
        return found


def _proof(token: bytes, who: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(token, b"".join((who, *nonces)), "sha256")


def _accepted(servers: Sequence[socket.socket], tokens: Mapping[str, bytes]) -> dict[str, Line]:
    """Connections by place, of those who know its token; strangers hold up nobody."""
    lines: dict[str, Line] = {}
    guests = _Guests(servers)
    deadline = time.monotonic() + CONNECT_SECONDS
    while len(lines) < len(tokens) and time.monotonic() < deadline:
        for guest in guests.complete(deadline):
            place = guest.place({p: t for p, t in tokens.items() if p not in lines})
            if place:
                lines[place] = Line(guest.connection)
                with contextlib.suppress(OSError):  # noticed when it is asked
                    guest.connection.sendall(_proof(tokens[place], b"welcome", guest.data[:NONCE_BYTES], guest.nonce))
            else:
                guest.connection.close()
    guests.close()
    for place in sorted(set(tokens) - set(lines)):
        os.write(
            2,
            f"meshmpi: host {place.split('|')[0]} has not connected to the first host of"
            " the job: hangs between hosts are not found.\n".encode(),
        )
    return lines


class _Guests:
    """All connections that have yet to prove themselves, and the doors by which they come."""

    def __init__(self, servers: Sequence[socket.socket]):
        self._doors = servers
        self._guests: dict[_Guest, None] = {}  # in the order in which they came
        self._selector = selectors.DefaultSelector()
        for door in servers:
            door.setblocking(False)
            self._selector.register(door, selectors.EVENT_READ)

    def complete(self, deadline: float) -> list[_Guest]:
        """Waits for something to come; returns the guests who have said everything, and forgets them."""
        now = time.monotonic()
        for guest in [g for g in self._guests if g.until <= now]:
            self._forget(guest).connection.close()
        until = min([deadline, *(g.until for g in self._guests)])
        found = []
        for key, _ in self._selector.select(max(0.0, until - now)):
            if key.data is None:
                self._let_in(key.fileobj)  # type: ignore[arg-type]
            elif key.data in self._guests and key.data.more():
                found.append(self._forget(key.data))
        return found

    def _let_in(self, door: socket.socket) -> None:
        for _ in range(MOST_GUESTS):
            if len(self._guests) >= MOST_GUESTS:
                self._oldest_leaves()
            try:
                guest = _Guest(door.accept()[0])
            except BlockingIOError:  # that was all
                return
            except OSError:  # it is gone again, or this process has no descriptor left
                self._oldest_leaves()
                time.sleep(0.01)
                return
            try:
                guest.connection.send(guest.nonce)
                self._selector.register(guest.connection, selectors.EVENT_READ, guest)
                self._guests[guest] = None
            except OSError:
                guest.connection.close()

    def _oldest_leaves(self) -> None:
        for guest in list(self._guests)[:1]:
            self._forget(guest).connection.close()

    def _forget(self, guest: _Guest) -> _Guest:
        self._selector.unregister(guest.connection)
        del self._guests[guest]
        return guest

    def close(self) -> None:
        """Closes the doors, and what has not proved itself."""
        for guest in list(self._guests):
            self._forget(guest).connection.close()
        self._selector.close()
        for door in self._doors:
            door.close()


def _dialled(addresses: Sequence[Address], token: bytes) -> Line | None:
    """A connection to the first of the addresses that answers and knows the token."""
    deadline = time.monotonic() + CONNECT_SECONDS - 2.0
    while time.monotonic() < deadline:
        for address in addresses:
            with contextlib.ExitStack() as unless_known, contextlib.suppress(OSError):
                connection = socket.create_connection(address, timeout=3.0)
                unless_known.callback(connection.close)
                if _known(connection, token):
                    unless_known.pop_all()
                    return Line(connection)
        time.sleep(0.2)
    return None


def _known(connection: socket.socket, token: bytes) -> bool:
    """Proves this end to the other, and whether the other proves itself."""
    deadline = time.monotonic() + GUEST_SECONDS
    nonce, other = secrets.token_bytes(NONCE_BYTES), _exactly(connection, NONCE_BYTES, deadline)
    connection.sendall(nonce + _proof(token, b"dial", other, nonce))
    answer = _exactly(connection, PROOF_BYTES, deadline)
    return hmac.compare_digest(answer, _proof(token, b"welcome", nonce, other))


def _exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    """So many bytes, or fewer where the other end closes or is late."""
    data = b""
    while len(data) < count and (left := deadline - time.monotonic()) > 0:
        connection.settimeout(left)
        part = connection.recv(count - len(data))
        if not part:
            break
        data += part
    return data
