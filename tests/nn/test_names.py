"""Names of variables: two layers never share them unless it is asked for."""

from __future__ import annotations

import inspect

import pytest

import meshmpi as mm
from meshmpi.errors import VariableError
from meshmpi.planner.report import scope_of

OUT, HEADS, KV = mm.Dimension("out", 6), mm.Dimension("heads", 2), mm.Dimension("d_kv", 4)
VOCAB, LENGTH = mm.Dimension("vocab", 11), mm.Dimension("length", 8)
LAYERS = {
    "dense": lambda x, **o: mm.dense(x, OUT, **o),
    "dense_product": lambda x, **o: mm.dense_product(x, None, OUT, "glu", **o),
    "dense_relu_dense": lambda x, **o: mm.dense_relu_dense(x, OUT, **o),
    "layer_norm": lambda x, **o: mm.layer_norm(x, "c", **o),
    "rms_norm": lambda x, **o: mm.rms_norm(x, "c", **o),
    "rms_norm_subsampled": lambda x, **o: mm.rms_norm_subsampled(x, "c", **o),
    "scale_norm": lambda x, **o: mm.scale_norm(x, "c", **o),
    "batch_norm": lambda x, **o: mm.batch_norm(x, True, **o),
    "rezero": lambda x, **o: mm.rezero(x, **o),
    "embedding": lambda x, **o: mm.embedding(mm.cast(x, "int32"), VOCAB, OUT, **o),
    "embedding_weights": lambda x, **o: mm.embedding_weights(VOCAB, OUT, **o),
    "relative_position_bias": lambda x, **o: mm.relative_position_bias(HEADS, LENGTH, OUT, **o),
    "conv1d": lambda x, **o: mm.conv1d(x, OUT, **o),
    "conv2d": lambda x, **o: mm.conv2d(x, OUT, **o),
    "conv3d": lambda x, **o: mm.conv3d(x, OUT, **o),
    "conv2d_transpose": lambda x, **o: mm.conv2d_transpose(x, OUT, **o),
    "conv3d_transpose": lambda x, **o: mm.conv3d_transpose(x, OUT, **o),
    "depthwise_conv": lambda x, **o: mm.depthwise_conv(x, [3], **o),
    "separable_conv1d": lambda x, **o: mm.separable_conv1d(x, OUT, **o),
    "separable_conv2d": lambda x, **o: mm.separable_conv2d(x, OUT, **o),
    "multihead_attention": lambda x, **o: mm.multihead_attention(x, None, None, KV, HEADS, **o),
    "local_self_attention": lambda x, **o: mm.local_self_attention(x, KV, HEADS, 2, **o),
    "local_self_attention_2d": lambda x, **o: mm.local_self_attention_2d(x, KV, HEADS, (2, 2), **o),
    "multihead_self_attention_memory_compressed": lambda x, **o: mm.multihead_self_attention_memory_compressed(
        x, False, 2, KV, HEADS, **o
    ),
    "mixture_of_experts": lambda x, **o: mm.mixture_of_experts(x, mm.Dimension("experts", 2), OUT, **o),
    "repeat": lambda x, **o: mm.repeat(lambda y: mm.rezero(y, name="r"), 2, [x], shared_variables=False, **o),
    "while_loop": lambda x, **o: mm.while_loop(
        lambda y: mm.less(mm.reduce_max(y), 1.0),
        lambda y: mm.rezero(y, name="r"),
        [x],
        max_steps=2,
        shared_variables=False,
        **o,
    ),
}
"""Every function of mm that makes variables of its own."""


def x() -> mm.Tensor:
    graph = mm.graph.current_graph()
    if "x" in graph.placeholders:
        return graph.placeholders["x"]
    return mm.placeholder("x", "batch:2;depth:4;length:8;c:4")


def made_by(graph: mm.Graph, call) -> list[str]:
    before = set(graph.variables)
    call()
    return [name for name in graph.variables if name not in before]


def used_by(y: mm.Tensor) -> set[str]:
    """Names of the variables that y depends on."""
    used, todo = set(), [y]
    while todo:
        operation = todo.pop().operation
        todo += operation.inputs
        used |= {operation.variable.name} if hasattr(operation, "variable") else set()
    return used


def test_the_table_has_every_function_whose_name_is_optional():
    found = {
        name
        for name in dir(mm)
        for f in [getattr(mm, name)]
        if inspect.isfunction(f)
        and inspect.signature(f).parameters.get("name", None) is not None
        and inspect.signature(f).parameters["name"].annotation == "str | None"
        and f.__module__.startswith("meshmpi.nn")
    }
    assert found == set(LAYERS)


@pytest.mark.parametrize("layer", LAYERS)
def test_unnamed_layers_have_variables_of_their_own(layer: str):
    make = LAYERS[layer]
    with mm.Graph() as graph:
        first, second, third = (made_by(graph, lambda: make(x())) for _ in range(3))
        assert first and len(first) == len(second) == len(third)
        with mm.scope("inner"):
            inner = made_by(graph, lambda: make(x()))
        assert inner == [f"inner/{name}" for name in first], "names are counted in each scope"
        with mm.scope(reuse=True):
            assert made_by(graph, lambda: [make(x()) for _ in range(3)]) == []
            with pytest.raises(VariableError, match="to share"):
                make(x())


@pytest.mark.parametrize("layer", LAYERS)
def test_a_name_given_twice_is_refused_unless_sharing_is_asked_for(layer: str):
    make = LAYERS[layer]
    with mm.Graph() as graph:
        made_by(graph, lambda: make(x(), name="twice"))
        with pytest.raises(VariableError, match="exists already") as caught:
            make(x(), name="twice")
        assert "'twice" in caught.value.problem and "reuse=True" in caught.value.remedy
        with mm.scope(reuse=True):
            assert made_by(graph, lambda: make(x(), name="twice")) == []


def test_a_variable_of_a_taken_name_names_both_places():
    with mm.Graph():
        mm.get_variable("w", "a:3")
        first = inspect.currentframe().f_lineno - 1
        with pytest.raises(VariableError) as caught:
            mm.get_variable("w", "a:3")
        text = str(caught.value)
    assert f"test_names.py:{first}, used at" in text and f"test_names.py:{first + 3}" in text
    assert "reuse=True" in text


def test_sharing_finds_layers_by_their_order_wherever_they_were_made():
    """Unnamed layers of one scope entered twice, and names that were taken in between."""

    def model(y: mm.Tensor) -> mm.Tensor:
        for _ in range(2):
            with mm.scope("block"):
                y = mm.rezero(y)
        return mm.rezero(y)

    with mm.Graph() as graph:
        mm.rezero(x(), name="rezero_1")
        model(x())
        model(x())
        names = list(graph.variables)
        assert names == [
            "rezero_1/scale",
            "block/rezero/scale",
            "block/rezero_1/scale",
            "rezero/scale",
            "block/rezero_2/scale",
            "block/rezero_3/scale",
            "rezero_2/scale",
        ]
        reads = {v.name: len(v._reads) for v in graph.variables.values()}
        with mm.scope(reuse=True):
            y = model(x())
        assert list(graph.variables) == names and reads == dict.fromkeys(names, 1)
    assert used_by(y) == {"block/rezero/scale", "block/rezero_1/scale", "rezero/scale"}


def test_turns_and_parts_share_what_the_first_one_makes():
    def body(y: mm.Tensor) -> mm.Tensor:
        return mm.dense(mm.rezero(y), OUT)

    with mm.Graph() as graph:
        mm.rezero(x())
        turns = mm.repeat(lambda y: mm.rezero(mm.rezero(y)), 3, [x()], shared_variables=True)
        assert list(graph.variables) == ["rezero/scale", "rezero_1/scale", "rezero_2/scale"]
        assert used_by(turns[0]) == {"rezero_1/scale", "rezero_2/scale"}
        mm.optimize.serialize_training_step(
            {"x": turns[0]}, lambda f: {"loss": mm.reduce_mean(body(f["x"]))}, "batch", 2
        )
    assert list(graph.variables)[3:] == ["rezero_3/scale", "dense/kernel", "dense/bias"]


def test_auto_shares_what_there_is_and_makes_the_rest():
    with mm.Graph() as graph, mm.scope("model", reuse="auto"):
        first = mm.get_variable("w", "a:3")
        assert mm.get_variable("w", "a:3") is first
        with mm.scope("strict", reuse=False):
            mm.get_variable("w", "a:3")
            with pytest.raises(VariableError, match="exists already"):
                mm.get_variable("w", "a:3")
    assert list(graph.variables) == ["model/w", "model/strict/w"]


def test_another_shape_is_refused_though_sharing_was_asked_for():
    with mm.Graph(), mm.scope(reuse="auto"):
        mm.dense(x(), OUT, name="tower")
        with pytest.raises(VariableError, match="is requested as"):
            mm.dense(x(), mm.Dimension("out", 7), name="tower")


def test_intermediates_of_attention_have_names_in_lists_and_variables_keep_theirs():
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:2;length:4;io:8")
        heads, kv = mm.Dimension("heads", 2), mm.Dimension("kv", 4)
        y = mm.multihead_attention(x, None, None, kv, heads, True, 0.5, use_bias=True)
        updates = mm.optimize.SGD(0.1).minimize(mm.reduce_mean(mm.square(y)))
    program = mm.plan(graph, "rows:2", "heads:rows", fetches=[y], updates=updates).program
    places = {scope_of(i) for i in program.instructions}
    parts = ("queries", "keys", "values", "attention_weights", "weighted_values", "output")
    for part in parts:
        assert {f"attention/{part}", f"attention/{part} (gradient)"} <= places, part
    variables = [f"attention/{n}{b}" for n in "qkvo" for b in ("", "_bias")]
    assert sorted(n for n in program.variables if n.startswith("attention")) == sorted(variables)
    # Random numbers depend on the name of what drops: it stands outside of the parts.
    assert [o.name for o in graph.operations if o.base_name == "dropout"] == ["attention/dropout"]
