"""The golden programs are what the compiler makes today, and use as few values as by hand.

When this fails: read the difference, decide whether it is an improvement, and if so
``python -m tests.golden --update``.
"""

from __future__ import annotations

import difflib

import pytest

import meshmpi as mm
from meshmpi.ir.program import Program
from meshmpi.nn.optimize import AdamW
from meshmpi.transformer.models import parameter_count
from tests.golden import BATCH, CONFIG, GOLDEN, path, program, transformer, two_layer_network


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_program(name: str):
    old, new = path(name).read_text().splitlines(), GOLDEN[name]().splitlines()
    difference = "\n".join(difflib.unified_diff(old, new, "golden", "now", lineterm="", n=1))
    assert old == new, f"python -m tests.golden --update, if this is meant:\n{difference}"


def test_no_golden_file_is_left_over():
    files = sorted(p.stem for p in path("x").parent.glob("*.txt"))
    assert files == sorted(GOLDEN)


# -- counts of the Transformer by hand -------------------------------------------------------------


def _reduced(p: Program) -> dict[str, int]:
    return dict(p.values().get("all_reduce", {}))


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("optimizer", [None, AdamW(0.01)], ids=["sgd", "adamw"])
def test_data_parallel_reduces_each_gradient_once(layers: int, optimizer):
    config = CONFIG.with_options(layers=layers)
    p = program(lambda: transformer(config, optimizer), "batch:rows", "rows:4")
    parameters = parameter_count(config)
    # ... and the loss itself, whose parts may be up to three sums.
    assert parameters <= _reduced(p)["rows"] <= parameters + 3
    assert p.counts()["all_reduce"] <= 3, "gradients of small tensors travel together"
    assert not any(kind in p.counts() for kind in ("all_gather", "all_to_all", "reduce_scatter"))


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_model_parallel_reduces_four_times_per_layer(layers: int):
    config = CONFIG.with_options(layers=layers)
    p = program(lambda: transformer(config), "heads:cols;d_ff:cols;vocab:cols", "cols:4")
    tokens = BATCH * config.length
    stream = tokens * config.d_model
    # Forward and backward two per layer; the embedding's output and the gradient of the softmax's
    # input; for the softmax over a split vocabulary largest logit, sum and target logit.
    assert _reduced(p)["cols"] == (4 * layers + 2) * stream + 3 * tokens
    assert not any(kind in p.counts() for kind in ("all_gather", "all_to_all", "reduce_scatter"))


@pytest.mark.parametrize("layers", [1, 2])
def test_data_and_model_parallel_at_once(layers: int):
    config = CONFIG.with_options(layers=layers)
    p = program(lambda: transformer(config), "batch:rows;heads:cols;d_ff:cols;vocab:cols")
    tokens = BATCH // 2 * config.length
    stream = tokens * config.d_model
    assert _reduced(p)["cols"] == (4 * layers + 2) * stream + 3 * tokens
    split = config.vocab * config.d_model * 2 + layers * (
        4 * config.d_model * config.heads * config.d_kv + 2 * config.d_model * config.d_ff
    )
    local = parameter_count(config) - split + split // 2
    assert local <= _reduced(p)["rows"] <= local + 3


def test_sequence_parallel_moves_what_the_all_reduces_moved():
    """An all_reduce is a reduce_scatter and an all_gather; between them only blocks are held."""
    layouts = "heads:cols;d_ff:cols;vocab:cols"
    plain = mm.plan(*_planned(CONFIG), layouts, **_options(CONFIG))
    constrained = CONFIG.with_options(residual_constraint="length:cols")
    sequence = mm.plan(*_planned(constrained), layouts, **_options(constrained))
    assert sequence.program.counts()["reduce_scatter"] >= 2
    assert sequence.cost.memory["arena"] <= plain.cost.memory["arena"]
    assert sequence.cost.bytes_sent <= plain.cost.bytes_sent * 1.3


_models: dict = {}


def _model(config):
    if config not in _models:
        _models[config] = transformer(config)
    return _models[config]


def _planned(config):
    return _model(config)[0], "cols:2"


def _options(config) -> dict:
    return {"fetches": _model(config)[1], "updates": _model(config)[2]}


# -- the paper's Table 1: values reduced by the two-layer network ----------------------------------

B, IO, H = 24, 36, 48


def _layer_pair(layout: str, mesh: str) -> dict[str, int]:
    """Elements handed to all_reduce per rank: forward and all three gradients, no bias, no loss."""
    batch, io, hidden = mm.Dimension("batch", B), mm.Dimension("io", IO), mm.Dimension("hidden", H)
    with mm.Graph() as graph:
        x, dy = mm.placeholder("x", [batch, io]), mm.placeholder("dy", [batch, io])
        w, v = mm.get_variable("w", [io, hidden]), mm.get_variable("v", [hidden, io])
        h = mm.maximum(mm.einsum([x, w], [batch, hidden]), 0.0)
        y = mm.einsum([h, v], [batch, io])
        grads = mm.gradients(y, [x, w, v], grad_ys=[dy])
    return _reduced(mm.plan(graph, mesh, layout, fetches=[y, *grads]).program)


@pytest.mark.parametrize(
    ("layout", "mesh", "want"),
    [
        ("", "all:4", {}),
        ("batch:all", "all:4", {"all": 2 * IO * H}),
        ("hidden:all", "all:4", {"all": 2 * B * IO}),
        ("batch:rows;hidden:cols", "rows:2;cols:3", {"rows": 2 * IO * H // 3, "cols": 2 * B * IO // 2}),
        (
            "batch:rows;hidden:cols;io:planes",
            "rows:2;cols:3;planes:4",
            {"rows": 2 * IO * H // 12, "cols": 2 * B * IO // 8, "planes": 2 * B * H // 6},
        ),
    ],
)
def test_values_of_table_1(layout: str, mesh: str, want: dict[str, int]):
    assert _layer_pair(layout, mesh) == want


def test_an_illegal_layout_of_the_two_layer_network():
    with pytest.raises(mm.LayoutError, match=r"\[io=6, hidden=12\] would be split twice over mesh axis 'rows'"):
        program(two_layer_network, "io:rows;hidden:rows")
