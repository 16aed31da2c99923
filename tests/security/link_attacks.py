"""Attacks over the network: whoever can connect to a port, or sit between two hosts."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from meshmpi.guard import deadlock, host_link
from meshmpi.guard import line as guard_line
from meshmpi.guard.host_link import HostLink, Line
from meshmpi.guard.rings import Call, Seen, to_json
from meshmpi.guard.watchdog import Member
from meshmpi.runtime.calls import CallKind
from tests.security.registry import Scene, attack

PLACES = ("one|p", "two|q")


class Reception:
    """The first host of a job, which waits for the others, and what came of it."""

    def __init__(self, scene: Scene, seconds: float = 10.0):
        scene.patch.setattr(host_link, "CONNECT_SECONDS", seconds)
        self.server = socket.create_server(("127.0.0.1", 0), backlog=host_link.BACKLOG)
        self.address = self.server.getsockname()[:2]
        self.tokens = {place: secrets.token_bytes(32) for place in PLACES}
        self.lines: dict[str, Line] = {}
        self.error: BaseException | None = None
        self.began = time.monotonic()
        self._closing = scene.closing
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        scene.closing.callback(self._close)

    def _run(self) -> None:
        try:
            self.lines = host_link._accepted([self.server], self.tokens)
        except BaseException as error:
            self.error = error
        self.seconds = time.monotonic() - self.began

    def _close(self) -> None:
        self._thread.join(30)
        self.server.close()
        for line in self.lines.values():
            line.close()

    def connection(self) -> socket.socket:
        """A stranger's connection."""
        return socket.create_connection(self.address, timeout=10)

    def dial(self, place: str) -> Line | None:
        """A host of the job comes."""
        return dialled(self._closing, [self.address], self.tokens[place])

    def end(self) -> str:
        """Both hosts come: what is wrong then, or nothing."""
        ends = [self.dial(place) for place in PLACES]
        self._thread.join(30)
        if self.error is not None:
            return f"{type(self.error).__name__}: {self.error}"
        if sorted(self.lines) != sorted(PLACES) or None in ends:
            return f"connected: {sorted(self.lines)}"
        if self.seconds > 5.0:
            return f"the hosts waited for {self.seconds:.1f} s"
        for place, end in zip(PLACES, ends, strict=True):
            assert end is not None
            end.say(["you are", place])
            if self.lines[place].heard(5.0) != ["you are", place]:
                return f"{place} is somebody else"
        return ""


def dialled(closing: contextlib.ExitStack, addresses: list[tuple[str, int]], token: bytes) -> Line | None:
    """A host's connection to the first of the addresses that knows the token."""
    line = host_link._dialled(addresses, token)
    if line is not None:
        closing.callback(line.close)
    return line


def says(*data: bytes) -> Callable[[Scene], str]:
    """A stranger connects, says something, and stays."""

    def attempt(scene: Scene) -> str:
        reception = Reception(scene)
        with contextlib.ExitStack() as stack:
            for part in data:
                stranger = stack.enter_context(reception.connection())
                stranger.sendall(part)
            return reception.end()

    return attempt


@attack()
def a_web_browser(scene: Scene) -> str:
    """A port scanner's request ends the job."""
    return says(b"GET / HTTP/1.0\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")(scene)


@attack()
def binary_garbage(scene: Scene) -> str:
    """Bytes without meaning, newlines among them, end the job."""
    return says(*(secrets.token_bytes(n) + b"\n" for n in (1, 47, 48, 4096, 200_000)))(scene)


@attack()
def documents_of_other_kinds(scene: Scene) -> str:
    """What an earlier version parsed before it looked at the secret: numbers, lists, no ASCII."""
    texts = ("[1,2]", "{}", "null", '["\u00fc","p"]', "[" * 100_000, '"' + "x" * 100_000)
    return says(*(t.encode() + b"\n" for t in texts))(scene)


@attack()
def silent_strangers(scene: Scene) -> str:
    """Strangers that say nothing make the hosts of the job wait, or be refused."""
    return says(*[b""] * 40)(scene)


@attack()
def half_open_connections(scene: Scene) -> str:
    """Connections that are closed at once, or reset, end the job."""
    reception = Reception(scene)
    for k in range(40):
        stranger = reception.connection()
        if k % 2:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        elif k % 4:
            stranger.shutdown(socket.SHUT_WR)
        stranger.close()
    return reception.end()


@attack()
def a_byte_at_a_time(scene: Scene) -> str:
    """A stranger that sends a byte now and then keeps its place for ever."""
    scene.patch.setattr(host_link, "GUEST_SECONDS", 0.5)
    reception = Reception(scene)
    with reception.connection() as stranger:
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < 5.0:
                stranger.sendall(b"x")
                time.sleep(0.15)  # too slow to have said all before it is over
        kept = time.monotonic() - began
    return reception.end() or ("" if kept < 3.0 else f"it was listened to for {kept:.1f} s")


@attack()
def a_thousand_connections(scene: Scene) -> str:
    """All descriptors of the process are used up, or pass the 1,024 that select() can take."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
    held: list[socket.socket] = []
    try:
        reception = Reception(scene)
        for _ in range(1000):
            held.append(reception.connection())
        return reception.end()
    finally:
        for one in held:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@attack()
def descriptors_beyond_select(scene: Scene) -> str:
    """With a thousand files open, as a large job has, the link between hosts fails."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[1], 4096), before[1]))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        return Reception(scene).end()
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@attack()
def a_wrong_token(scene: Scene) -> str:
    """A stranger that knows how hosts greet each other, but not the secret, is let in."""
    reception = Reception(scene)
    with reception.connection() as stranger:
        known = host_link._known(stranger, secrets.token_bytes(32))
    return reception.end() or ("it was let in" if known else "")


@attack()
def a_token_of_another_host(scene: Scene) -> str:
    """Who has the secret of one host comes as that host twice."""
    reception = Reception(scene)
    first = reception.dial(PLACES[0])
    assert first is not None
    with reception.connection() as again:
        known = host_link._known(again, reception.tokens[PLACES[0]])
    second = reception.dial(PLACES[1])
    reception._thread.join(20)
    first.say("I am")
    right = reception.lines[PLACES[0]].heard(5.0) == "I am"
    assert second is not None
    return "it was let in" if known or not right else ""


@attack()
def a_greeting_that_was_listened_to(scene: Scene) -> str:
    """What one host said to be let in is said again by a stranger who has heard it."""
    heard: list[bytes] = []

    class Listened:
        def __init__(self, real: socket.socket):
            self._real = real

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def sendall(self, data: bytes) -> None:
            heard.append(data)
            self._real.sendall(b"x" * len(data))  # and kept back

    reception = Reception(scene)
    with reception.connection() as victim:
        host_link._known(Listened(victim), reception.tokens[PLACES[0]])  # type: ignore[arg-type]
    with reception.connection() as stranger:
        stranger.recv(host_link.NONCE_BYTES)
        stranger.sendall(heard[0])
        stranger.settimeout(5.0)
        answer = stranger.recv(64)
    return reception.end() or ("it was let in" if answer else "")


@attack()
def an_impostor_of_the_first_host(scene: Scene) -> str:
    """A host tells what its ranks do to whoever answers at the first host's address."""
    scene.patch.setattr(host_link, "CONNECT_SECONDS", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def impostor() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(bytes(host_link.NONCE_BYTES))
                        connection.recv(host_link._HELLO_BYTES)
                        connection.sendall(bytes(host_link.PROOF_BYTES))

        threading.Thread(target=impostor, daemon=True).start()
        line = dialled(scene.closing, [server.getsockname()], secrets.token_bytes(32))
        server.shutdown(socket.SHUT_RDWR)
    return "" if line is None else "it was believed"


@attack()
def a_first_host_that_stays_silent(scene: Scene) -> str:
    """A connection that answers nothing keeps a host from the right address."""
    scene.patch.setattr(host_link, "GUEST_SECONDS", 0.3)
    reception = Reception(scene)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ends = [dialled(scene.closing, [silent.getsockname(), reception.address], reception.tokens[p]) for p in PLACES]
    reception._thread.join(20)
    return "" if None not in ends and len(reception.lines) == 2 else "the host was not found"


@attack()
def listening_where_nobody_of_the_job_is(scene: Scene) -> str:
    """The port is open to networks from which no host of the job comes."""
    own = host_link._own_numbers()
    scene.patch.setattr(host_link, "_own_numbers", lambda: [*own, "127.0.0.9"])
    servers = host_link._listening(["127.0.0.77"])  # routed by the loopback alone
    numbers = [s.getsockname()[0] for s in servers]
    for server in servers:
        server.close()
    return "" if numbers and set(numbers) <= {"127.0.0.1", "127.0.0.77"} else f"{numbers}"


# ---- a connection that was let in ------------------------------------------------------------

SUM = CallKind("all_reduce", "sum", "float32", "rows", 10, "10")


class Dog:
    """What a link needs of a watchdog."""

    def __init__(self, place: str):
        self.members = {"p": [Member(0, "one", "p", 10, 1, "")], "q": [Member(1, "two", "q", 11, 1, "")]}
        self.me = self.members[place][0]

    def look(self) -> dict[int, Seen]:
        return {}

    def hosts(self) -> dict[str, list[Member]]:
        return self.members

    def claim(self) -> None:
        raise AssertionError("the job is ended")

    def gather_stacks(self, ranks: list[int]) -> dict[int, str]:
        return {}


@contextlib.contextmanager
def linked() -> Iterator[SimpleNamespace]:
    """Two hosts, and the naked connections between them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        asks = HostLink(Dog("p"), {"q": Line(near)}, True)  # type: ignore[arg-type]
        answers = HostLink(Dog("q"), {"p": Line(far)}, False)  # type: ignore[arg-type]
        yield SimpleNamespace(asks=asks, answers=answers, near=near, far=far)


def waiting() -> Seen:
    call = Call("w", 1, SUM, 40, "a.py:1", 5, 5.0, True)
    return Seen(0, "h", 10, "running", calls=[call], members={"w": (0, 1)})


def answered(data: bytes) -> Callable[[Scene], str]:
    """The other host answers something; its ranks must not be taken for lost by that."""

    def attempt(scene: Scene) -> str:
        scene.patch.setattr("sys.stderr.write", lambda text: len(text))
        with linked() as pair:
            threading.Thread(target=_send, args=(pair.far, data), daemon=True).start()
            found: dict[int, Seen] = {}
            for _ in range(4):
                found = pair.asks.exchange({0: waiting()}, again=True)
                if any(line.closed for line in pair.asks._lines.values()):
                    break
            lost = [s for s in found.values() if s.life == "gone"]
            try:
                deadlock.find(found, None)
            except Exception as error:
                return f"the watchdog ends by {type(error).__name__}: {error}"
            return f"ranks are lost: {lost}" if lost else ""

    return attempt


def _send(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(data)


@attack()
def an_answer_that_is_no_document(scene: Scene) -> str:
    """A damaged answer ends the job, or the watchdog's thread."""
    return answered(b"\xff\xfe{]\n")(scene)


@attack()
def an_answer_that_nests_without_end(scene: Scene) -> str:
    """The same, by depth."""
    return answered(b"[" * 1_000_000 + b"\n")(scene)


@attack()
def an_answer_of_the_wrong_types(scene: Scene) -> str:
    """Names where numbers belong end the watchdog's thread later on."""
    there = waiting()
    there.rank = 1
    bad = to_json(there)
    bad["calls"][0][1], bad["calls"][0][6] = "first", "long"
    many = [{"seen": [1]}, {"seen": {"x": {}}}, {"seen": {"1": bad}}, 7, {"seen": {"1": None}}]
    return "; ".join(filter(None, (answered(json.dumps(d).encode() + b"\n")(scene) for d in many)))


@attack()
def an_answer_without_end(scene: Scene) -> str:
    """A line that never ends fills the memory."""
    scene.patch.setattr(guard_line, "MOST_BYTES", 1 << 20)
    return answered(b"x" * (4 << 20))(scene)


@attack()
def a_question_that_is_none(scene: Scene) -> str:
    """A question that nobody of the job asks ends the thread that answers."""
    scene.patch.setattr("sys.stderr.write", lambda text: len(text))
    gained = []
    for question in (b'"evil"\n', b"{}\n", b"\x00\n", b"3\n", b"[" * 100_000 + b"\n"):
        with linked() as pair:
            pair.near.sendall(question)
            time.sleep(0.05)
            found = pair.answers.exchange({1: waiting()})
            gained += [str(s) for s in found.values() if s.life == "gone"]
    return "; ".join(gained)
