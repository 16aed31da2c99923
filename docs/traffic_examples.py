"""Small expressions whose programs show what each kind of split sends; for docs/ops.md."""

from __future__ import annotations

from typing import NamedTuple

import meshmpi as mm

MESH = "rows:2;cols:2"


class Example(NamedTuple):
    """An expression over x[a, b], w[b, c], n[a], variable v[b, c] and the dims, and a layout."""

    code: str
    layout: str
    storage: str = ""


EXAMPLES = [
    Example("x + x", "a:rows;b:cols"),
    Example("einsum([x, w], [a, c])", "a:rows;c:cols"),
    Example("einsum([x, w], [a, c])", "b:cols"),
    Example("einsum([x, w], [a, c])", "b:rows+cols"),
    Example("einsum([x, w], [a, c])", "a:rows;b:cols"),
    Example("constrain(einsum([x, w], [a, c]), 'a:cols')", "b:cols"),
    Example("gradients([reduce_sum(square(einsum([x, v], [a, c])))], [v])[0]", "a:rows"),
    Example("gradients([reduce_sum(square(einsum([x, v], [a, c])))], [v])[0]", "c:cols"),
    Example("einsum([x, v], [a, c])", "a:rows", "b:rows"),
    Example("reduce_sum(x, reduced_dim=b)", "a:rows;b:cols"),
    Example("reduce_max(x)", "a:rows;b:cols"),
    Example("softmax(x, b)", "a:rows"),
    Example("softmax(x, b)", "b:cols"),
    Example("layer_norm(x, b)", "b:cols"),
    Example("softmax_cross_entropy_with_logits(x, n, b)", "a:rows;b:cols"),
    Example("gather(w, n, b)", "a:rows"),
    Example("gather(w, n, b)", "b:cols"),
    Example("gather(w, n, b)", "c:cols"),
    Example("top_k(x, b, D('k', 2))[0]", "b:cols"),
    Example("slice(x, 2, 4, a)", "b:cols"),
    Example("slice(x, 2, 4, a)", "a:rows"),
    Example("concat([x, x], 'a')", "a:rows"),
    Example("shift(x, 1, a, wrap=True)", "a:rows"),
    Example("transpose(x, [b, a])", "a:rows;b:cols"),
    Example("reshape(x, [D('ab', 96)])", "a:rows;ab:rows"),
    Example("rename(x, {'a': 'd'})", "a:rows;d:rows"),
    Example("rename(x, {'a': 'd'})", "a:rows"),
    Example("rename(x, {'a': 'd'})", "d:rows"),
    Example("rename(x, {'a': 'd', 'b': 'e'})", "a:rows;e:rows"),
    Example("dropout(x, is_training=True, rate=0.1)", "a:rows;b:cols"),
]


def traffic_row(example: Example) -> str:
    """Collectives of the example's program: kind, axes, elements per rank."""
    a, b, c = mm.Dimension("a", 8), mm.Dimension("b", 12), mm.Dimension("c", 16)
    with mm.Graph() as graph:
        names = {name: getattr(mm, name) for name in dir(mm) if not name.startswith("_")}
        names |= {"a": a, "b": b, "c": c, "D": mm.Dimension}
        names |= {"x": mm.placeholder("x", [a, b]), "w": mm.placeholder("w", [b, c])}
        names |= {"n": mm.placeholder("n", [a], "int32"), "v": mm.get_variable("v", [b, c])}
        result = eval(example.code, names)
    program = mm.plan(
        graph, MESH, example.layout, fetches=[result], updates=[], storage=example.storage
    ).program
    sent = [
        f"{kind} over {axes}: {elements}"
        for kind, table in program.values().items()
        for axes, elements in table.items()
    ]
    return ", ".join(sent) or "nothing"
