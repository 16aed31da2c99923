"""What hosts tell each other, over connections of one process with itself."""

from __future__ import annotations

import socket
import threading
import time
from types import SimpleNamespace

import pytest

from meshmpi.guard.host_link import HostLink, Line
from meshmpi.guard.rings import Call, Seen
from meshmpi.guard.watchdog import Member
from meshmpi.runtime.calls import CallKind

SUM = CallKind("all_reduce", "sum", "float32", "rows", 10, "10")


class Dog:
    """What a link needs of a watchdog."""

    def __init__(self, place: str):
        self.members = {
            "p": [Member(0, "one", "p", 10, 1, "")],
            "q": [Member(1, "two", "q", 11, 1, ""), Member(2, "two", "q", 12, 1, "")],
        }
        self.me = self.members[place][0]
        self.claimed: list[bool] = []
        self.seen: dict[int, Seen] = {}

    def look(self):
        return self.seen

    def hosts(self):
        return self.members

    def claim(self):
        self.claimed.append(True)

    def gather_stacks(self, ranks):
        return {r: f"stack {r}" for r in ranks}


def state(r: int, waits: float = 0.0) -> Seen:
    calls = [Call("w", 1, SUM, 40, "a.py:1", 5, waits, True)] if waits else []
    return Seen(r, "h", 10 + r, "running", calls=calls, members={"w": (0, 1, 2)})


@pytest.fixture
def pair():
    """The asking link of host p and the answering one of host q, joined by TCP."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    asks = HostLink(Dog("p"), {"q": Line(near)}, True)  # type: ignore[arg-type]
    answers = HostLink(Dog("q"), {"p": Line(far)}, False)  # type: ignore[arg-type]
    yield SimpleNamespace(asks=asks, answers=answers, near=near, far=far)
    near.close()
    far.close()


def answering(pair, seen):
    """Has the other host answer for a while, as its watchdog does."""

    def run() -> None:
        end = time.monotonic() + 2.0
        while time.monotonic() < end and not done.is_set():
            pair.answers.exchange(seen)
            time.sleep(0.01)

    done = threading.Event()
    thread = threading.Thread(target=run)
    thread.start()
    return done, thread


def test_ranks_of_the_other_host_are_seen(pair):
    own, there = {0: state(0, 5.0)}, {1: state(1, 4.0), 2: state(2)}
    done, thread = answering(pair, there)
    pair.asks._host.seen = own
    assert pair.asks.exchange(own) == {**own, **there}
    assert pair.asks.gather_stacks([0, 2]) == {2: "stack 2"}
    done.set()
    thread.join()
    assert pair.answers._host.claimed, "it shows stacks only where the job ends"


def test_nothing_is_sent_while_nobody_waits(pair):
    assert pair.asks.exchange({0: state(0, 0.5)}) == {0: state(0, 0.5)}
    pair.far.setblocking(False)
    with pytest.raises(BlockingIOError):
        pair.far.recv(1)


def test_a_host_that_does_not_answer_is_slow(pair):
    """As a stopped one: it is asked once, and nothing is known of its ranks."""
    pair.asks._host.seen = {0: state(0, 5.0)}
    for _ in range(3):
        assert set(pair.asks.exchange({0: state(0, 5.0)})) == {0}
    pair.far.setblocking(False)
    assert pair.far.recv(1 << 16) == b'"look"\n'


def test_a_connection_that_breaks_is_a_host_lost(pair):
    pair.far.close()
    pair.asks._host.seen = {0: state(0, 5.0)}
    found = pair.asks.exchange({0: state(0, 5.0)})
    assert [found[r].life for r in (0, 1, 2)] == ["running", "gone", "gone"]
    assert "does not answer" in found[1].why


def test_the_other_hosts_notice_too(pair):
    pair.near.close()
    found = pair.answers.exchange({1: state(1, 5.0), 2: state(2)})
    assert {r: s.life for r, s in found.items()} == {0: "gone", 1: "running", 2: "running"}


def test_a_host_that_says_good_bye_is_not_lost(pair):
    pair.answers.close()
    pair.asks._host.seen = {0: state(0, 5.0)}
    for _ in range(2):
        assert set(pair.asks.exchange({0: state(0, 5.0)})) == {0}
