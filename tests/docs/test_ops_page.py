"""docs/ops.md is complete, and what it says is sent is what programs send."""

from __future__ import annotations

import inspect

import pytest

import meshmpi as mm
from docs.generate_ops import families
from docs.traffic import NOTHING, by_dims, combined, traffic
from docs.traffic_examples import BINARY, COMBINATIONS, EXAMPLES, NO_EXAMPLE, TENSORS, UNARY
from meshmpi import nn
from meshmpi.graph import ops


def public_functions() -> list[str]:
    """Names that make tensors; initializers do not."""
    return [
        name
        for package in (ops, nn)
        for functions in families(package).values()
        for name, f in functions
        if not f.__module__.endswith("initializers") and name not in NO_EXAMPLE
    ]


def test_every_function_has_an_example():
    missing = [name for name in public_functions() if name not in EXAMPLES]
    assert not missing, f"give docs/traffic_examples.py an example of {missing}"
    assert len(missing) + len(public_functions()) > 100


def test_every_example_is_of_a_function():
    known = {name for package in (ops, nn) for name in package.__all__}
    for name, code in EXAMPLES.items():
        assert name in known, f"there is no mm.{name}"
        assert f"{name}(" in code, f"the example of {name} does not call it: {code}"
    assert all(inspect.isfunction(getattr(mm, name)) for name in (*UNARY, *BINARY))


@pytest.mark.parametrize(
    ("code", "sent"),
    [
        ("einsum([x, w], [a, c])", {"a": NOTHING, "b": "all_reduce 128", "c": NOTHING}),
        ("rename(x, {'a': 'd'})", {"a": "all_gather 48", "b": NOTHING, "d": NOTHING}),
        ("shift(x, 1, b, wrap=True)", {"a": NOTHING, "b": "shift 8"}),
        ("reduce_sum(x, reduced_dim=b)", {"a": NOTHING, "b": "all_reduce 8"}),
        ("exp(x)", {"a": NOTHING, "b": NOTHING}),
    ],
)
def test_traffic_worked_out_on_paper(code: str, sent: dict[str, str]):
    """x[a=8, b=12], w[b=12, c=16], two ranks."""
    assert traffic(code).forward == sent


def test_traffic_with_gradients_worked_out_on_paper():
    found = traffic("einsum([x, w], [a, c])")
    assert found.results == ["[a=8, c=16]"]
    assert found.backward == {
        "a": "all_reduce 192",  # of dw [b, c]
        "b": "all_reduce 128",  # of the result
        "c": "all_reduce 96",  # of dx [a, b]
    }
    assert traffic("equal(x, y)").backward is None


def test_dims_with_the_same_traffic_stand_together():
    sent = {"a": NOTHING, "b": "shift 8", "c": "shift 8", "d": NOTHING}
    assert by_dims(sent) == "**b, c**: shift 8; a, d: nothing"
    assert by_dims({"a": NOTHING}) == by_dims({}) == NOTHING


def test_combinations_lower():
    texts = [combined(e) for e in COMBINATIONS]
    assert sum(t != NOTHING for t in texts) > len(texts) / 2
    assert any("reduce_scatter" in t for t in texts) and any("all_to_all" in t for t in texts)


def test_every_tensor_of_the_examples_is_used():
    codes = [*EXAMPLES.values(), *(e.code for e in COMBINATIONS)]
    unused = [n for n in TENSORS if not any(n in code.replace("(", " ") for code in codes)]
    assert not unused
