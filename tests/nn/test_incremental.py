"""Decoding with kept keys and values: equal to the whole model in every layout; what it costs."""

from __future__ import annotations

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.compiler.passes.memory import Sharing
from meshmpi.dims import MeshShape
from meshmpi.errors import ConfigError, LayoutError, ShapeError
from meshmpi.runtime.variables import OverlaidStore
from meshmpi.transformer.models import TransformerConfig, encoder_decoder, lm
from meshmpi.transformer.models.caches import encoder_caches, reordered_caches, spread_caches
from meshmpi.transformer.models.incremental import Chunk, incremental_decoder, incremental_lm
from tests.layouts import legal_layouts

BATCH, LENGTH, MEMORY, SOURCE = 3, 10, 12, 5
CONFIG = TransformerConfig(vocab=13, length=MEMORY, d_model=8, d_ff=10, heads=4, d_kv=4, layers=2, dtype="float64")
OPTIONS = {
    "paper": {},
    "multi_query": {"memory_heads": 1, "attention_bias": True, "norm": "layer", "ff_bias": True},
    "llama": {"memory_heads": 2, "rotary": True, "learned_positions": False, "activation": "swiglu"},
    "t5": {"relative_buckets": 8, "learned_positions": False, "tied_softmax": True},
    "local_window": {"local_window": 3, "rotary": True},
    "experts": {"experts": 3, "experts_every": 1, "expert_eval_capacity": 3.0},
    "qwen3": {"memory_heads": 2, "rotary": True, "learned_positions": False, "query_norm": "head"},
    "olmo2": {"query_norm": "all", "norm_output": True, "rotary": True, "position_offset": 2},
    "pythia": {"parallel": True, "rotary": True, "rotary_width": 2, "learned_positions": False},
    "norm_after": {"norm_after": True, "embedding_norm": True, "softmax_bias": True},
}
SCHEDULE = (
    (4, (4, 2, 3)),
    (1, (1, 1, 0)),
    (4, (2, 4, 1)),
    (1, (1, 1, 1)),
    (1, (1, 0, 1)),
    (1, (0, 1, 1)),
    (4, (0, 0, 3)),
)
"""Tokens given at a time, and how many of them each row has: rows stand at different places."""


def tokens(seed: int = 0, low: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, CONFIG.vocab, (BATCH, LENGTH)).astype(np.int32)


def chunk(length: int, seen: int = MEMORY, memory: int = MEMORY, beams: int = 0) -> Chunk:
    beam = f";beam:{beams}" if beams else ""
    fed = mm.placeholder("tokens", f"batch:{BATCH}{beam};length:{length}", "int32")
    start, count = (mm.placeholder(n, f"batch:{BATCH}", "int32") for n in ("start", "count"))
    return Chunk(fed, start, count, memory, seen)


class Decoder:
    """Programs of one model on one mesh and layout, on the parameters of ``store``."""

    def __init__(self, options: TransformerConfig, mesh, layout: str, store, source: bool):
        self.config, self.mesh, self.source = options, mesh, source
        self.layout = "" if not layout else ";".join(f"{r.dim}?:{'+'.join(r.axes)}" for r in mm.Layout(layout))
        self.splits_memory = "memory_length:" in layout
        self.store, self.steps = OverlaidStore(store), {}

    def compiled(self, key, build):
        if key not in self.steps:
            with mm.Graph() as graph:
                fetches, updates = build()
            self.steps[key] = mm.compile(
                graph, self.mesh, self.layout, fetches=fetches, updates=updates, variables=self.store
            )
        return self.steps[key]

    def decode(self, length: int, seen: int):
        def build():
            c = chunk(length, seen)
            done = incremental_decoder(self.config, c, SOURCE) if self.source else incremental_lm(self.config, c)
            return {"logits": done.logits}, done.updates

        return self.compiled((length, seen), build)

    def encode(self, source: np.ndarray, fresh: np.ndarray) -> None:
        def build():
            ids = mm.placeholder("source", f"batch:{BATCH};source_length:{SOURCE}", "int32")
            return {}, encoder_caches(self.config, ids, mm.placeholder("fresh", f"batch:{BATCH}", "bool"))

        self.compiled("encode", build)(source=source, fresh=fresh)

    def run(self, text: np.ndarray, expected: np.ndarray) -> None:
        """All of the schedule; the logits of each row are those of the whole model."""
        at, checked = np.zeros(BATCH, np.int32), 0
        for length, counts in SCHEDULE:
            count = np.array(counts, np.int32)
            given = np.full((BATCH, length), 7, np.int32)  # what is no token must not matter
            for k in range(BATCH):
                given[k, : count[k]] = text[k, at[k] : at[k] + count[k]]
            few = max((at + count).max(), length) <= 8 and not self.splits_memory
            step = self.decode(length, 8 if few else MEMORY)
            found = step(tokens=given, start=at, count=count)["logits"].numpy()
            at += count
            for k in np.flatnonzero(count):
                np.testing.assert_allclose(found[k], expected[k, at[k] - 1], rtol=0, atol=1e-12)
                checked += 1
        assert checked > 12 and list(at) == [9, 9, 10]


def whole(options: TransformerConfig, mesh, layout: str = "", source: np.ndarray | None = None):
    """Logits of the whole model in one program without passes, and its parameters."""
    with mm.Graph() as graph:
        fed = mm.placeholder("tokens", f"batch:{BATCH};length:{LENGTH}", "int32")
        if source is None:
            logits, feeds = lm(options, fed), {}
        else:
            ids = mm.placeholder("source", f"batch:{BATCH};source_length:{SOURCE}", "int32")
            logits, feeds = encoder_decoder(options, ids, fed), {"source": source}
    # A model with a local window has no memory_length, its caches have.
    layout = layout.replace("memory_length:", "memory_length?:")
    step = mm.compile(graph, mesh, layout, fetches=[logits], optimize=False)
    return step(tokens=tokens(), **feeds)[logits].numpy(), step.variables


def both(options: TransformerConfig) -> mm.Graph:
    """The whole model and one call of the decoder, for layouts that are legal for both."""
    with mm.Graph() as graph:
        lm(options, mm.placeholder("whole", f"batch:{BATCH};length:{LENGTH}", "int32"))
        with mm.scope(reuse="auto"):  # caches are new
            incremental_lm(options, chunk(4))
    return graph


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_language_model(name: str):
    options = CONFIG.with_options(**OPTIONS[name])
    mesh = mm.SimulatedMesh("rows:2;cols:3" if name == "paper" else "rows:2;cols:2")
    expected, _ = whole(options, mesh)
    assert np.ptp(expected) > 1
    few = 5 if name == "paper" else 2
    for layout in legal_layouts(both(options), mesh.shape, limit=few):
        again, store = whole(options, mesh, layout)
        np.testing.assert_allclose(again, expected, rtol=0, atol=1e-12)
        Decoder(options, mesh, layout, store, False).run(tokens(), expected)


def test_a_layout_that_splits_a_cache_twice_is_refused():
    with mm.Graph() as graph:
        done = incremental_lm(CONFIG, chunk(1))
    message = r"tensor \[memory_length=12, batch=3, heads=4, d_kv=4\] would be split twice"
    with pytest.raises(LayoutError, match=message):
        mm.plan(graph, "a:2", "memory_length:a;d_kv:a", fetches=[done.logits])


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("name", "mesh", "layout"),
    [
        ("paper", "a:1", ""),
        ("paper", "a:3", "memory_length:a"),
        ("paper", "rows:2;cols:3", "batch:rows;heads:cols;d_ff:cols;vocab:cols"),
        ("paper", "a:2", "length:a;source_length:a"),
        ("t5", "rows:2;cols:2", "memory_length:cols;heads:rows"),
        ("t5", "rows:2;cols:2", "batch:rows+cols"),
        ("llama", "rows:2;cols:2", "d_kv:rows;d_model:cols"),
        ("llama", "a:3", "heads:a"),
    ],
)
def test_equals_the_encoder_decoder(name: str, mesh: str, layout: str):
    options = CONFIG.with_options(**OPTIONS[name], padding_id=0)
    source = np.array([[3, 4, 5, 6, 7], [8, 9, 0, 0, 0], [1, 2, 3, 0, 0]], np.int32)
    simulated = mm.SimulatedMesh(mesh)
    expected, store = whole(options, simulated, layout, source)
    decoder = Decoder(options, simulated, layout, store, True)
    everyone = np.ones(BATCH, bool)
    decoder.encode(source[::-1].copy(), everyone)  # of earlier texts
    decoder.encode(np.where([[True], [False], [True]], source, 9), np.array([True, False, True]))
    decoder.encode(source, np.array([False, True, False]))
    decoder.run(tokens(), expected)


def test_positions_beyond_the_learned_ones_are_refused():
    with mm.Graph(), pytest.raises(ShapeError, match="length is 14"):
        incremental_lm(CONFIG, chunk(14))
    with mm.Graph(), pytest.raises(ShapeError, match="seen is 13 and memory is 12"):
        chunk(1, seen=13)
    with mm.Graph(), pytest.raises(ConfigError, match="later tokens"):
        incremental_lm(CONFIG.with_options(token_dropout=0.1, mask_id=3), chunk(1))


# -- beams -----------------------------------------------------------------------------------------


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ("a:1", ""),
        ("rows:2;cols:3", "beam:cols;heads:rows"),
        ("a:3", "memory_length:a"),
        ("rows:2;cols:2", "batch:rows;beam:cols"),
    ],
)
@pytest.mark.parametrize("seen", [8, MEMORY])
def test_beams_go_on_from_their_parents(mesh: str, layout: str, seen: int):
    simulated = mm.SimulatedMesh(mesh)
    if "memory_length" in layout:
        seen = MEMORY
    _, store = whole(CONFIG, simulated, ";".join(r for r in layout.split(";") if not r.startswith("beam")))
    decoder = Decoder(CONFIG, simulated, layout, store, False)
    rows, text = mm.Shape(f"batch:{BATCH};beam:3"), tokens()
    start, count = np.zeros(BATCH, np.int32), np.array([3, 1, 2], np.int32)
    decoder.decode(4, 8 if seen == 8 else MEMORY)(tokens=text[:, :4].copy(), start=start, count=count)
    decoder.compiled("spread", lambda: ({}, spread_caches(CONFIG, rows, MEMORY)))()

    def beam_step():
        done = incremental_lm(CONFIG, chunk(1, seen, beams=3))
        return {"logits": done.logits}, done.updates

    def reorder():
        parents = mm.placeholder("parents", rows, "int32")
        return {}, reordered_caches(CONFIG, rows, parents, MEMORY, seen)

    texts = [[[int(t) for t in text[k, : count[k]]] for _ in range(3)] for k in range(BATCH)]
    at, rng = count.copy(), np.random.default_rng(1)
    for _ in range(4):
        new = rng.integers(1, 13, (BATCH, 3)).astype(np.int32)
        feeds = {"tokens": new[:, :, None], "start": at, "count": np.ones(BATCH, np.int32)}
        found = decoder.compiled("step", beam_step)(feeds)["logits"].numpy()
        for k, b in np.ndindex(BATCH, 3):
            texts[k][b] = [*texts[k][b], int(new[k, b])]
        at = at + 1
        expected = _logits_of([t for row in texts for t in row], store.mesh)
        np.testing.assert_allclose(found.reshape(9, -1), expected, rtol=0, atol=1e-12)
        parents = rng.integers(0, 3, (BATCH, 3)).astype(np.int32)
        decoder.compiled("reorder", reorder)(parents=parents)
        texts = [[texts[k][parents[k, b]] for b in range(3)] for k in range(BATCH)]


def _logits_of(texts: list[list[int]], mesh) -> np.ndarray:
    padded = np.zeros((len(texts), MEMORY), np.int32)
    for k, t in enumerate(texts):
        padded[k, : len(t)] = t
    with mm.Graph() as graph:
        fed = mm.placeholder("tokens", f"batch:{len(texts)};length:{MEMORY}", "int32")
        logits = lm(CONFIG, fed)
    step = mm.compile(graph, mesh, fetches=[logits])
    whole = step(tokens=padded)[logits].numpy()
    return np.stack([whole[k, len(t) - 1] for k, t in enumerate(texts)])


# -- cost ------------------------------------------------------------------------------------------


def plan(memory: int, seen: int, layout: str = "", mesh: str = "a:1", length: int = 1):
    options = CONFIG.with_options(length=1024)
    with mm.Graph() as graph:
        done = incremental_lm(options, chunk(length, seen, memory))
    return mm.plan(graph, mesh, layout, fetches=[done.logits], updates=done.updates)


def test_a_token_costs_what_is_looked_at_and_no_more():
    """The past is not computed again, and what is held beyond the positions looked at is free."""
    one, two, four = plan(1024, 64), plan(1024, 128), plan(1024, 256)
    assert plan(64, 64).cost.flops == one.cost.flops
    assert four.cost.flops - two.cost.flops == 2 * (two.cost.flops - one.cost.flops)
    # Only attention grows: two products and the softmax of [batch, heads, seen] in each layer.
    points = CONFIG.layers * BATCH * CONFIG.heads * 64
    assert 4 * CONFIG.d_kv * points < two.cost.flops - one.cost.flops < (4 * CONFIG.d_kv + 16) * points
    assert one.program.counts() == four.program.counts()


@pytest.mark.parametrize(
    ("mesh", "layout"), [("a:1", ""), ("rows:2;cols:3", "heads:rows;batch:cols"), ("a:3", "memory_length:a")]
)
def test_caches_grow_in_place(mesh: str, layout: str):
    """The new rows alone are written: neither the cache nor the part looked at is ever copied."""
    memory = 1024
    made = plan(memory, memory if "memory_length" in layout else 64, layout, mesh).program
    sharing = Sharing(made)
    puts = [i for i in made.instructions if i.kind == "put"]
    assert len(puts) == 2 * CONFIG.layers
    for i in puts:
        assert sharing.root(i.outputs[0]) == sharing.root(i.inputs[0])
        assert str(sharing.root(i.outputs[0])).startswith("variable decoder/layer_00")
    cuts = [i for i in made.instructions if i.kind == "slice" and i.attrs.dim == "memory_length"]
    assert len(cuts) == (0 if "memory_length" in layout else 2 * CONFIG.layers)
    for i in cuts:
        assert str(sharing.root(i.outputs[0])).startswith("variable ")


@pytest.mark.parametrize("layout", ["heads:a", "memory_length:a", "batch:a"])
def test_a_rank_holds_its_share_of_the_caches(layout: str):
    n = {"heads:a": 4, "memory_length:a": 4, "batch:a": 3}[layout]
    made = plan(1024, 1024, layout, f"a:{n}").program
    mesh = MeshShape(f"a:{n}")
    caches = [v.type for v in made.variables.values() if "cache" in v.name]
    assert len(caches) == 2 * CONFIG.layers
    whole_bytes = 2 * CONFIG.layers * 1024 * BATCH * CONFIG.heads * CONFIG.d_kv * 8
    for rank in range(n):
        sizes = [np.prod(t.local_sizes(mesh, mesh.coordinates(rank))) for t in caches]
        assert 8 * sum(sizes) * n == whole_bytes
