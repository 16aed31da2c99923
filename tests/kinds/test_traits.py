"""Everything that a row says of its kind holds on random blocks, and to say the opposite is noticed.

As DTensor validates its sharding rules: what a trait claims is tried out, see `observe`.  A trait may
say less than what is seen where that costs speed only; `LESS` lists where, and nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.ir.kinds import KINDS
from meshmpi.ir.program import Traits
from tests.kinds.observe import ELSEWHERE, OBSERVED, aliases, choices, linear
from tests.kinds.samples import MESH, RANKS, SAMPLES, Sample, cut

LESS = {
    "tileable": "conv transpose slice gather scatter_add put top_k block_sum cumsum iota local_function",  # no chain
    "pointwise": "transpose take_shard feed read step iota",  # nothing is computed
    "repeatable": "scatter_add put top_k block_sum local_function feed read",  # kept rather than made again
    "in_place": "contract:nothing all_reduce:same",  # of a product that sums nothing; of packed values
    "linear_in": "put block_sum cumsum all_reduce reduce_scatter all_gather all_to_all shift wait tiled",
}
"""Trait -> kinds whose row claims less than what is seen; behind a colon what it claims."""
STEERING = ("scalar", "hides_network", "carries_gradient")
"""Traits that only say what is worth while, or where numbers belong in a report."""
METHODS = ("linear_in", "alias")
EVERY = (*OBSERVED, *METHODS)


@cache
def samples_of(kind: str) -> list[Sample]:
    return [s for s in SAMPLES if s.attrs.kind == kind]


@cache
def seen(kind: str, trait: str) -> Any:
    found = {**OBSERVED, "linear_in": linear, "alias": aliases}[trait](samples_of(kind))
    return found if isinstance(found, list) else [found]


def said(kind: str, trait: str) -> list[Any]:
    """What the row says, in the order of what is seen."""
    samples = samples_of(kind)
    if trait == "linear_in":
        return [s.attrs.linear_in(marks, (ELSEWHERE,)) for s in samples for marks in choices(s)]
    if trait == "alias":
        return [s.attrs.alias(s.program, s.instruction) is not None for s in samples]
    return [getattr(KINDS[kind].traits, trait)]


def complaint(kind: str, trait: str) -> str:
    """What is wrong with a trait of a row; empty if nothing is."""
    claims, facts = said(kind, trait), seen(kind, trait)
    order = (False, True, "", "same", "any")
    less = dict(entry.partition(":")[::2] for entry in LESS.get(trait, "").split())
    if claims == facts:
        return f"'{kind}' does not say less of {trait}" if kind in less else ""
    bold = any(order.index(a) > order.index(b) for a, b in zip(claims, facts, strict=True))
    if not bold and less.get(kind) in ("", claims[0] or "nothing"):
        return ""
    return f"'{kind}' says of {trait} {claims}, seen is {facts}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_says_what_is_seen(kind: str):
    assert samples_of(kind), f"add a sample of '{kind}'"
    assert [c for trait in EVERY if (c := complaint(kind, trait))] == []


def _negations(kind: str, trait: str) -> Iterator[tuple[str, object]]:
    """(attribute of the row, wrong value of it) for every opposite of a trait."""
    row = KINDS[kind]
    if trait == "linear_in":
        right = row.linear_in
        yield trait, lambda self, marks, axes: not right(self, marks, axes)
    elif trait == "alias":
        places = row.alias
        yield trait, lambda self, p, i: None if places(self, p, i) is not None else 0
    else:
        now = getattr(row.traits, trait)
        for other in ("", "same", "any") if trait == "in_place" else (False, True):
            if other != now:
                yield "traits", replace(row.traits, **{trait: other})


def test_the_negation_of_every_trait_is_noticed(monkeypatch: pytest.MonkeyPatch):
    for kind, trait in itertools.product(KINDS, EVERY):
        seen(kind, trait)  # before the row is wrong
    unnoticed = []
    for kind, trait in itertools.product(KINDS, EVERY):
        if trait == "linear_in" and not any(s.ins for s in samples_of(kind)):
            continue  # nothing that it could be linear in
        for name, wrong in _negations(kind, trait):
            with monkeypatch.context() as m:
                m.setattr(KINDS[kind], name, wrong)
                if not complaint(kind, trait):
                    unnoticed.append((kind, trait, wrong))
    assert unnoticed == []


def test_every_trait_is_seen_or_steers():
    assert {f.name for f in fields(Traits)} == {*OBSERVED, *STEERING}


def test_a_sum_over_its_own_axes_is_not_taken_later():
    for s in SAMPLES:
        axes = getattr(s.attrs, "axes", ())
        if axes:
            assert not s.attrs.linear_in([True] * len(s.ins), axes), s.attrs


def _graph() -> tuple[mm.Graph, mm.Tensor, Any]:
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:4;d:6")
        h = mm.layer_norm(mm.dense(x, mm.Dimension("hidden", 8), name="one", activation=mm.relu), "hidden")
        h = mm.softmax(mm.dense(h, mm.Dimension("e", 6), name="two"), "e")
        loss = mm.reduce_mean(mm.square(h))
        return graph, loss, mm.optimize.Adam(0.1).minimize(loss)


def _losses(**options: Any) -> list[float]:
    graph, loss, updates = _graph()
    mesh = mm.SimulatedMesh("rows:2;cols:3")
    step = mm.compile(
        graph, mesh, "batch:rows;hidden:cols", fetches=[loss], updates=updates, kernels="numpy", **options
    )
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    return [step(x=x)[loss] for _ in range(3)]


@pytest.mark.parametrize("trait", STEERING)
def test_a_trait_that_steers_changes_no_result(monkeypatch: pytest.MonkeyPatch, trait: str):
    wanted = _losses(optimize=False)
    for row in KINDS.values():
        monkeypatch.setattr(row, "traits", replace(row.traits, **{trait: not getattr(row.traits, trait)}))
    np.testing.assert_allclose(_losses(), wanted, rtol=1e-5)


def _whole(s: Sample, results: list[list[np.ndarray]], o: int) -> np.ndarray:
    """A result put together from the blocks of all ranks, what is pending summed."""
    t = s.outs[o]
    whole = np.zeros(t.shape.sizes, results[0][o].dtype)
    done: dict[object, None] = {}
    for at, ys in zip(RANKS, results, strict=True):
        place = tuple(at[a] for a in (*t.used_axes, *t.partial))
        if place not in done:
            done[place] = None
            whole[tuple(slice(*b) for b in t.block(MESH, at))] += ys[o]
    return whole


@pytest.mark.parametrize("s", SAMPLES, ids=lambda s: s.attrs.kind)
def test_blocks_together_are_what_one_rank_computes(s: Sample):
    """Each sample is legal, and means on blocks what it means on whole arrays."""
    if not s.outs or s.by_blocks or s.attrs.traits.given:
        return
    given, results = s.whole(), s.run(s.blocks(s.whole()))
    alone = s.on_one_rank([_summed(s, given, k) for k in s.reads])
    for o, t in enumerate(s.outs):
        if t.halos:
            for at, ys in zip(RANKS, results, strict=True):
                np.testing.assert_allclose(ys[o], cut(alone[o], t, at), rtol=1e-6)
        else:
            np.testing.assert_allclose(_whole(s, results, o), alone[o], rtol=1e-6)


def _summed(s: Sample, given: list[list[np.ndarray]], k: int) -> np.ndarray:
    """The whole of an input, what is pending summed."""
    found: dict[object, np.ndarray] = {}
    for at, xs in zip(RANKS, given, strict=True):
        found[tuple(at[a] for a in s.ins[k].partial)] = xs[k]
    return np.sum(list(found.values()), axis=0).astype(given[0][k].dtype)
