"""The layout search: what it finds against trying everything, and the reasons it gives."""

import itertools

import pytest

import meshmpi as mm
from meshmpi.dims import MeshShape
from meshmpi.errors import ConfigError
from meshmpi.planner import bounded_search
from meshmpi.planner.bounded_search import Priced, Rejected, Screen, search
from meshmpi.planner.candidates import Candidate, LowerBound, candidates, independent_sets, mesh_shapes
from meshmpi.planner.layout_search import digest, pricing, search_layouts
from meshmpi.planner.machine import Curve, Network, ProductRates, operations_from
from tests.planner import build
from tests.planner.build import small_lm


def machine(bandwidth=1e9, latency=1e-6, memory_bytes=0):
    changes = {"products": {"float32": ProductRates.constant(1e10)}, "memory": Curve(((1.0, 1e10),)), "call": 1e-7}
    changes |= {"operations": operations_from(1e-10), "networks": {"": Network(latency, bandwidth)}}
    return build.machine(memory_bytes=memory_bytes, **changes)


def two_layers(batch, io, hidden):
    """The paper's example of section 4, with a training step."""
    with mm.Graph() as graph:
        x = mm.placeholder("x", [("batch", batch), ("io", io)])
        w = mm.get_variable("w", [("io", io), ("hidden", hidden)])
        v = mm.get_variable("v", [("hidden", hidden), ("io", io)])
        h = mm.relu(mm.einsum([x, w], [("batch", batch), ("hidden", hidden)]))
        y = mm.einsum([h, v], [("batch", batch), ("io", io)])
        loss = mm.reduce_mean(mm.square(y - x))
        updates = mm.optimize.SGD(0.1).minimize(loss)
    return graph, [loss], updates


def everything(work, mesh, price, but=()):
    """Prices of all assignments of dims to at most one axis each, illegal ones left out."""
    dims = [d for d in work.splittable() if d not in but]
    found = []
    for axes in itertools.product(("", *mesh.names), repeat=len(dims)):
        layout = {d: (a,) for d, a in zip(dims, axes, strict=True) if a}
        priced = price(Candidate(mesh, layout, 0.0, 0.0, {}))
        if isinstance(priced, Priced):
            found.append(priced)
    return found


@pytest.mark.quick(5)
@pytest.mark.parametrize("bandwidth", [1e7, 1e9, 1e12])
@pytest.mark.parametrize("sizes", [(64, 8, 8), (4, 32, 64), (16, 16, 16)])
@pytest.mark.parametrize("shape", ["rows:4", "rows:2;cols:2"])
def test_the_best_layout_is_that_of_trying_everything(shape, sizes, bandwidth):
    graph, fetches, updates = two_layers(*sizes)
    chosen, mesh = machine(bandwidth), MeshShape(shape)
    found = search_layouts(graph, 4, chosen, fetches=fetches, updates=updates, mesh=mesh)
    price = pricing((graph, fetches, updates), chosen)
    best = min(everything(digest(graph, fetches, updates), mesh, price), key=lambda p: p.seconds)
    assert found.complete
    assert found.best.seconds <= best.seconds * (1 + 1e-12)


@pytest.mark.matrix
def test_a_transformer_against_everything():
    graph, fetches, updates = small_lm(layers=1)
    chosen, mesh = machine(1e8), MeshShape("rows:2")
    found = search_layouts(graph, 2, chosen, fetches=fetches, updates=updates, mesh=mesh)
    price = pricing((graph, fetches, updates), chosen)
    others = everything(digest(graph, fetches, updates), mesh, price, ("d_kv", "memory_length"))
    best = min(others, key=lambda p: p.seconds)
    assert found.best.seconds <= best.seconds * (1 + 1e-12)


def test_wide_models_are_split_and_large_batches_too():
    def best(*sizes):
        graph, fetches, updates = two_layers(*sizes)
        found = search_layouts(graph, 4, machine(1e7), fetches=fetches, updates=updates, mesh="rows:4")
        return found.best.layout

    assert best(4096, 8, 8) == "batch:rows"
    assert best(4, 64, 2048) == "hidden:rows"


def test_memory_limits_reject_with_bytes_and_find_storage_in_parts():
    """Data-parallel is fastest; where parameters do not fit whole they are stored in parts."""
    graph, fetches, updates = two_layers(8192, 64, 64)
    free = search_layouts(graph, 4, machine(), fetches=fetches, updates=updates, mesh="rows:4")
    assert free.best.layout == "batch:rows"
    wide, fetches, updates = two_layers(64, 256, 256)
    price = pricing((wide, fetches, updates), machine())
    whole = price(Candidate(MeshShape("rows:4"), {"batch": ("rows",)}, 0.0, 0.0, {}))
    tight = search_layouts(
        wide, 4, machine(1e12, 1e-12), fetches=fetches, updates=updates, mesh="rows:4", memory_limit=whole.memory - 1
    )
    assert tight.best is not None and tight.best.memory < whole.memory
    rejected = [r for r in tight.rejected if r.layout == "batch:rows" and not r.storage]
    assert rejected and "MB per rank, the limit is" in rejected[0].reason
    assert "rejected mesh {rows: 4}, layout 'batch:rows'" in tight.report()


def test_nothing_fits_is_said():
    graph, fetches, updates = two_layers(8, 8, 8)
    found = search_layouts(graph, 4, machine(), fetches=fetches, updates=updates, memory_limit=100, mesh="rows:4")
    assert found.best is None and "no layout fits" in found.report()


def test_candidates_are_legal_and_bounded_by_their_price():
    graph, fetches, updates = small_lm(layers=1)
    chosen = machine()
    price = pricing((graph, fetches, updates), chosen)
    found = candidates(digest(graph, fetches, updates), MeshShape("rows:2;cols:2"), chosen)
    assert len({c.texts for c in found}) == len(found) > 50
    for c in found[::29]:
        priced = price(c)
        assert isinstance(priced, Priced), priced
        assert c.bound <= priced.seconds


def test_the_papers_layout_is_among_the_first_guesses():
    """Its models were trained with batch over one axis; heads, d_ff and vocab over the other."""
    config = mm.transformer.paper_language_model(6)
    with mm.Graph() as graph:
        tokens, targets = (mm.placeholder(n, "batch:256;length:256", "int32") for n in ("tokens", "targets"))
        loss, _ = mm.transformer.lm_loss(config, tokens, targets, training=True)
        updates = mm.optimize.Adafactor(1e-3).minimize(loss)
    from meshmpi.planner.machine_file import load_machine

    work = digest(graph, [loss], updates)
    found = candidates(work, MeshShape("rows:16;cols:32"), load_machine("tpuv2"))
    paper = {"batch": ("rows",), "heads": ("cols",), "d_ff": ("cols",), "vocab": ("cols",)}
    assert paper in [dict(c.layout) for c in found[:10]]


def test_meshes_are_all_ascending_factorisations():
    def found(ranks, axes):
        return [m.sizes for m in mesh_shapes(ranks, axes, ("rows", "cols", "planes"))]

    assert found(12, 2) == [(12,), (2, 6), (3, 4)]
    assert found(8, 3) == [(8,), (2, 4), (2, 2, 2)]
    assert found(7, 2) == [(7,)] and found(1, 2) == [(1,)]


def test_independent_sets_hold_no_conflict():
    conflicts = {frozenset("ab"), frozenset("bc")}
    found = independent_sets("abc", conflicts)
    assert sorted(found) == [(), ("a",), ("a", "c"), ("b",), ("c",)]


def test_an_unknown_machine_is_refused():
    graph, fetches, updates = two_layers(8, 8, 8)
    with pytest.raises(ConfigError, match="no machine 'mars'"):
        search_layouts(graph, 4, "mars", fetches=fetches, updates=updates)


def test_an_illegal_layout_is_rejected_with_its_message():
    graph, fetches, updates = two_layers(8, 8, 8)
    both = Candidate(MeshShape("rows:2"), {"batch": ("rows",), "io": ("rows",)}, 0.0, 0.0, {})
    found = pricing((graph, fetches, updates), machine())(both)
    assert isinstance(found, Rejected) and "batch" in found.reason and "rows" in found.reason


def test_megatrons_layout_is_found_for_few_sequences_and_a_fast_network():
    """Two sequences cannot be split over four ranks: heads, d_ff and vocabulary are."""
    config = mm.transformer.TransformerConfig(vocab=1024, length=8, d_model=64, d_ff=512, heads=8, d_kv=16, layers=1)
    with mm.Graph() as graph:
        tokens, targets = (mm.placeholder(n, "batch:2;length:8", "int32") for n in ("tokens", "targets"))
        loss, _ = mm.transformer.lm_loss(config, tokens, targets, training=True)
        updates = mm.optimize.Adam(1e-3).minimize(loss)
    fast = machine(1e11, 1e-8)
    found = search_layouts(graph, 4, fast, fetches=[loss], updates=updates, mesh="rows:4")
    layout = dict(rule.split(":") for rule in found.best.layout.split(";"))
    assert {d for d, axes in layout.items() if axes == "rows"} >= {"heads", "d_ff", "vocab"}


def test_optimizer_slots_are_stored_apart_where_only_they_do_not_fit():
    """Adam's two slots are two thirds of the variables: split, the step fits; nothing is gathered
    but what the update wrote."""
    made = []

    def step(slots):
        made.append(slots)
        with mm.Graph() as graph:
            x = mm.placeholder("x", [("batch", 4096), ("io", 8)])
            w = mm.get_variable("w", [("io", 8), ("hidden", 64)])
            v = mm.get_variable("v", [("hidden", 64), ("io", 8)])
            h = mm.relu(mm.einsum([x, w], [("batch", 4096), ("hidden", 64)]))
            y = mm.einsum([h, v], [("batch", 4096), ("io", 8)])
            loss = mm.reduce_mean(mm.square(y - x))
            optimizer = mm.optimize.Adam(0.1, storage=slots or None)
            updates = optimizer.minimize(loss)
        return graph, [loss], updates

    known, mesh = machine(bandwidth=1e12, latency=0.0), MeshShape("rows:4")
    work = digest(*step(""))
    options = {"seconds": 20.0, "meshes": [mesh]}
    whole = pricing(step, known)(Candidate(mesh, {"batch": ("rows",)}, 0.0, 0.0, {}))
    limit = whole.memory - 1
    without = search(work, 4, known, pricing(step(""), known, limit), **options)
    found = search(work, 4, known, pricing(step, known, limit), slots=True, **options)
    assert found.best is not None and found.best.memory <= limit
    assert without.best is None or found.best.seconds <= without.best.seconds
    tried = {p.slots for p in found.ranking} | {r.slots for r in found.rejected}
    assert tried == {"", "hidden:rows", "io:rows"} == set(made)
    apart = next(p for p in found.ranking if p.slots)
    assert f"optimizer storage '{apart.slots}'" in str(apart)
    graph, fetches, updates = step(apart.slots)  # what is told can be compiled as told
    plan = mm.plan(graph, mesh, apart.layout, fetches=fetches, updates=updates, storage=apart.storage or None)
    assert plan.cost.peak_memory == apart.memory and plan.cost.bytes_sent == apart.bytes_sent


def test_what_variables_alone_exceed_is_rejected_without_a_price():
    graph, fetches, updates = two_layers(8, 256, 256)
    work, known, mesh = digest(graph, fetches, updates), machine(1e12, 1e-12), MeshShape("rows:4")
    free, priced = pricing((graph, fetches, updates), known), []
    limit = free(Candidate(mesh, {"hidden": ("rows",)}, 0.0, 0.0, {})).memory
    price = pricing((graph, fetches, updates), known, limit)

    def watched(c):
        priced.append(c)
        return price(c)

    found = search(work, 4, known, watched, meshes=[mesh], memory_limit=limit)
    assert found.best is not None and found.best.memory <= limit
    why = {r.layout: r.reason for r in found.rejected if not r.storage}
    wanted = f"524 kB per rank of variables alone, the limit is {limit / 1e3:.3g} kB"
    assert why["batch:rows"] == wanted
    assert ("batch:rows", "") not in {c.texts[1:3] for c in priced}
    # What is told is a lower bound of what the plan needs.
    lower_bound = LowerBound(work, known)
    for c in candidates(work, mesh, known):
        assert lower_bound.least_bytes(c) <= free(c).memory


def test_a_search_without_time_says_so():
    graph, fetches, updates = two_layers(64, 8, 8)
    work, known = digest(graph, fetches, updates), machine()
    price = pricing((graph, fetches, updates), known)
    found = search(work, 4, known, price, seconds=1e-9)
    assert "batch:rows" in [p.layout for p in found.ranking]
    assert not found.complete and found.tried < found.considered
    assert "the most promising" in found.report() and "1. mesh" in found.report()
    few = search(work, 4, known, lambda c: Rejected(*c.texts, "too much", 1), seconds=1e-9)
    assert few.best is None and "--seconds tries more" in few.report()
    for wrong in ({"seconds": 0.0}, {"seconds": -1.0}, {"most_axes": 0}, {"most_axes": 4}):
        with pytest.raises(ConfigError, match="a search of"):
            search(work, 4, known, price, **wrong)


def test_plain_data_parallelism_is_priced_first_and_listing_candidates_takes_no_work_from_it(monkeypatch):
    graph, fetches, updates = two_layers(64, 8, 8)
    work, known, priced, told = digest(graph, fetches, updates), machine(), [], []
    monkeypatch.setattr(bounded_search, "LISTED_PER_SECOND", 0.01)
    monkeypatch.setattr(bounded_search, "PRICED_PER_SECOND", work.operations)

    def price(c):
        priced.append(c.texts[:2])
        return pricing((graph, fetches, updates), known)(c)

    found = search(work, 4, known, price, seconds=10.0, looked=lambda *args: told.append(args))
    assert priced[0] == ("{rows: 4}", "batch:rows")
    assert len(priced) >= 5 and len(found.ranking) >= 5 and not found.complete
    assert found.report().count("layout '") >= 5  # the runners-up
    assert told and all(done < known and "best" in text for done, known, text in told)


def test_the_answer_does_not_depend_on_how_busy_the_machine_is(monkeypatch):
    graph, fetches, updates = two_layers(64, 8, 8)
    work, known = digest(graph, fetches, updates), machine()
    price = pricing((graph, fetches, updates), known)
    # Work for a few prices, and so much time that only a slow clock uses it up.
    monkeypatch.setattr(bounded_search, "PRICED_PER_SECOND", work.operations / 200)
    usual = search(work, 4, known, price, seconds=1000.0)
    clock = itertools.count(0, 1000.0)
    for name in ("process_time", "thread_time", "perf_counter", "monotonic", "time"):
        monkeypatch.setattr(bounded_search.time, name, lambda: next(clock))
    busy = search(work, 4, known, price, seconds=1000.0)
    assert len(usual.ranking) > 3
    assert not usual.complete
    assert (busy.ranking, busy.rejected, busy.tried) == (usual.ranking, usual.rejected, usual.tried)


def test_layouts_that_are_the_same_are_looked_at_once():
    graph, fetches, updates = two_layers(64, 64, 64)
    work, known = digest(graph, fetches, updates), machine()
    (one,) = candidates(work, MeshShape("rows:1"), known)
    assert one.texts[1] == ""
    for c in candidates(work, MeshShape("rows:2;cols:2"), known):
        assert not c.layout or any(axes != ("rows", "cols") for axes in c.layout.values())


@pytest.mark.matrix
def test_a_screen_is_looked_at_first_and_its_best_are_priced_in_full():
    known, mesh = machine(), MeshShape("rows:2")
    few, whole = small_lm(1), small_lm(4)
    full, asked = pricing(whole, known), []

    def price(c):
        asked.append(c.texts[1])
        return full(c)

    screen = Screen(digest(*few), pricing(few, known))
    work = digest(*whole)
    found = search(work, 2, known, price, meshes=[mesh], screen=screen, seconds=20.0)
    alone = search(work, 2, known, full, meshes=[mesh], seconds=60.0)
    assert found.best.layout == alone.best.layout and found.best.seconds == alone.best.seconds
    assert asked[0] == alone.best.layout


@pytest.mark.matrix
def test_a_screen_that_leaves_nothing_that_fits_ends_in_time():
    known, mesh, asked = machine(), MeshShape("rows:2"), []
    few = small_lm(1)
    screen = Screen(digest(*few), pricing(few, known))

    def price(c):
        asked.append(c)
        return Rejected(*c.texts, "too much", 1)

    short = search(digest(*few), 2, known, price, meshes=[mesh], screen=screen, seconds=1e-9)
    assert short.best is None and not short.complete and len(asked) <= 1
    asked.clear()
    whole = search(digest(*few), 2, known, price, meshes=[mesh], screen=screen, seconds=60.0)
    assert whole.best is None and whole.complete and len(asked) >= 10
    assert "no layout fits" in whole.report()
