"""Conclusions about ranks that wait, from states made by hand."""

from __future__ import annotations

from meshmpi.guard import deadlock
from meshmpi.guard.deadlock import LOST, find, named
from meshmpi.guard.rings import Call, Seen
from meshmpi.runtime.calls import CallKind
from meshmpi.transformer.training.supervisor import BY_ITSELF

SUM = CallKind("all_reduce", "sum", "float32", "rows", 10, "10")
ALL = {"w": (0, 1, 2, 3), "a": (0, 1), "b": (2, 3), "c": (0, 2), "d": (1, 3)}


def rank(
    r: int,
    calls: str = "",
    waits: bool = False,
    life: str = "running",
    status: int | None = None,
    kinds: dict[int, CallKind] | None = None,
    seconds: float = 5.0,
    kept: int = 100,
) -> Seen:
    """A rank that has called collectives of the communicators named by letters, in this order."""
    reached: dict[str, tuple[int, int]] = {g: (0, 0) for g, m in ALL.items() if r in m}
    made = []
    for k, g in enumerate(calls):
        number, digest = reached[g]
        kind = (kinds or {}).get(k, SUM)
        reached[g] = (number + 1, 31 * digest + kind.signature)
        last = waits and k == len(calls) - 1
        made.append(Call(g, number + 1, kind, 40, f"a.py:{k}", reached[g][1], seconds, last))
    members = {g: m for g, m in ALL.items() if r in m}
    return Seen(r, "h", 100 + r, life, status, "step", 7, 1.0, len(calls), made[-kept:], reached, members)


def ranks(*seen: Seen) -> dict[int, Seen]:
    return {s.rank: s for s in seen}


def test_a_rank_that_computes_or_is_stopped_is_waited_for():
    for life in ("running", "stopped"):
        slow = rank(1, "w", life=life)
        assert find(ranks(rank(0, "ww", True), slow, rank(2, "ww", True), rank(3, "ww", True))) is None


def test_a_stopped_rank_inside_a_collective_is_waited_for():
    assert find(ranks(rank(0, "ww", True), rank(1, "ww", True, life="stopped"))) is None


def test_ranks_that_are_all_in_the_same_call_are_on_their_way():
    assert find(ranks(*(rank(r, "ww", True) for r in range(4)))) is None


def test_waiting_through_others_for_a_rank_that_computes():
    found = find(ranks(rank(0, "aw", True), rank(1, "a"), rank(2, "bw", True), rank(3, "b", True)))
    assert found is None, "3 has come to b, 1 computes: both will come to w"


def test_swapped_communicators():
    found = find(ranks(rank(0, "a", True), rank(1, "d", True), rank(2, "c", True), rank(3, "b", True)))
    assert found is not None and found.kind == "stuck"
    assert found.waiting == (0, 1, 2, 3)
    assert "different collectives" in found.problem and "a.py:0" in found.problem


def test_a_rank_that_has_left():
    found = find(ranks(rank(0, "ww", True), rank(1, "w", life="left", status=0)))
    assert found is not None and (found.kind, found.ranks, found.waiting) == ("stuck", (1,), (0,))
    assert "rank 1 left the program by exit status 0" in found.problem and found.status == 1
    found = find(ranks(rank(0, "ww", True), rank(1, "w", life="left", status=3)))
    assert found is not None and found.status == 3


def test_ranks_that_left_and_nobody_misses():
    assert find(ranks(rank(0, "w"), rank(1, "w", life="left", status=3))) is None
    assert find(ranks(rank(0, "w", life="left"), rank(1, "w", life="left"))) is None


def test_a_process_that_is_gone():
    found = find(ranks(rank(0, "ww", True), rank(1, "w", life="gone")))
    assert found is not None and (found.kind, found.ranks) == ("lost", (1,))
    assert "rank 1" in found.problem and "pid 101" in found.problem
    assert found.status == LOST and LOST not in BY_ITSELF, "a lost rank is worth another start"


def test_calls_that_differ_are_found_though_all_have_ended():
    for field, value in (("op", "max"), ("dtype", "int32"), ("elements", 5), ("kind", "broadcast")):
        other = {1: SUM._replace(**{field: value})}
        found = find(ranks(rank(0, "www"), rank(1, "www"), rank(2, "www", kinds=other)))
        assert found is not None and (found.kind, found.ranks) == ("differ", (2,)), field
        assert "a.py:1" in found.problem and "call 2" in found.problem


def test_calls_that_differed_before_the_records_that_are_kept():
    other = {1: SUM._replace(op="max")}
    seen = ranks(rank(0, "w" * 9, kept=3), rank(1, "w" * 9, kinds=other, kept=3))
    found = find(seen)
    assert found is not None and found.kind == "differ" and found.ranks == (0, 1)
    assert "at or before call 7" in found.problem and "MESHMPI_DEBUG" in found.remedy


def test_communicators_with_other_calls_are_no_difference():
    other = {0: SUM._replace(op="max")}
    assert find(ranks(rank(0, "a"), rank(1, "a"), rank(2, "b", kinds=other), rank(3, "b", kinds=other))) is None


def test_a_limit_of_the_wait():
    seen = ranks(rank(0, "ww", True, seconds=50.0), rank(1, "w"))
    assert find(seen, 60.0) is None
    found = find(seen, 40.0)
    assert found is not None and found.kind == "stalled" and found.ranks == (1,)
    assert "running outside of collectives (step, step 7" in found.problem


def test_ranks_of_which_nothing_is_known_are_trusted():
    assert find(ranks(rank(0, "ww", True))) is None


def test_names():
    assert named([3]) == "rank 3"
    assert named([4, 0, 1, 2]) == "ranks 0-2,4"


def test_what_a_rank_does_in_words():
    assert deadlock.doing(rank(0, life="gone")) == "gone"
    assert "waiting 5.0 s in all_reduce(sum, float32" in deadlock.doing(rank(0, "w", True))


def test_one_of_too_many_kinds_differs_from_none():
    """Ranks come to the end of their tables at different times."""
    other = CallKind("other")
    late, early = rank(0, "www", True), rank(1, "www", True)
    early.calls = [c._replace(kind=other) if k else c for k, c in enumerate(early.calls)]
    assert find(ranks(late, early)) is None
    early.calls[2] = early.calls[2]._replace(digest=7)
    early.reached["w"] = (3, 7)
    found = find(ranks(late, early))
    assert found is not None and found.kind == "differ" and "at or before call 3" in found.problem
