"""Schedules against NumPy, and their text form."""

import math

import numpy as np
import pytest

from meshmpi.errors import ConfigError
from meshmpi.graph import Graph, ops
from meshmpi.nn import schedules as s
from tests.nn.build import value

STEPS = [0, 1, 5, 9, 10, 11, 49, 50, 99, 100, 150]


def nanogpt(it, peak=0.001, warmup=10, total=100, minimum=0.0001):
    if it < warmup:
        return peak * (it + 1) / (warmup + 1)
    if it > total:
        return minimum
    ratio = (it - warmup) / (total - warmup)
    return minimum + 0.5 * (1 + math.cos(math.pi * ratio)) * (peak - minimum)


def half_cosine(t):
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1, t / 100)))


def slanted(t, total=100, cut=20, ratio=32, peak=0.01):
    """Howard and Ruder 2018, equation 3."""
    p = t / cut if t < cut else max(0, 1 - (t - cut) / (cut * (total / cut - 1)))
    return peak * (1 + p * (ratio - 1)) / ratio


def slanted_of_93(t):
    """The same as Mesh-TensorFlow computes it, where the rise is no whole number of steps: 18.6."""
    p = t / 18 if t < 18 else max(0, 1 - (t - 18) / (18 * (1 / 0.2 - 1)))
    return 0.01 * (1 + p * 31) / 32


def noam(t, total=100, warmup=10):
    return 2.0 * max(t, warmup) ** -0.5 * min(1, max(0, (total - t) / (total * 0.4)))


CASES = {
    "slanted": (s.slanted_triangular(100, 0.2), slanted),
    "slanted_of_93": (s.slanted_triangular(93, 0.2), slanted_of_93),
    "slanted_rising": (s.slanted_triangular(200, 1.0, 4.0, 1.0), lambda t: (1 + 3 * t / 200) / 4),
    "noam": (s.noam(100, 10, 0.4, 2.0), noam),
    "noam_without_end": (s.noam(100, 10, 0), lambda t: max(t, 10) ** -0.5),
    "truncated_rsqrt": (s.truncated_rsqrt(50), lambda t: max(t, 50) ** -0.5),
    "linear_rate": (s.linear_decay_learning_rate(100, 0.3, 40), lambda t: 0.3 * min(1, max(0, (100 - t) / 60))),
    "text_slanted": (s.parse_schedule("slanted_triangular(100, 0.2)"), slanted),
    "constant": (s.constant(0.3), lambda t: 0.3),
    "warmup": (s.linear_warmup(10), lambda t: min(1, t / 10)),
    "rsqrt": (s.rsqrt_decay(10), lambda t: max(t, 10) ** -0.5),
    "linear": (s.linear_decay(100, 40), lambda t: min(1, max(0, (100 - t) / 40))),
    "linear_all": (s.linear_decay(100), lambda t: max(0, (100 - t) / 100)),
    "cosine": (s.cosine(0.001, 10, 100, 0.0001), nanogpt),
    "cosine_decay": (s.cosine_decay(100, 0.1), half_cosine),
    "paper": (
        s.paper_schedule(100, 40, 10),
        lambda t: min(1, t / 10) * max(t, 10) ** -0.5 * min(1, max(0, (100 - t) / 40)),
    ),
    "product": (s.product(2.0, s.linear_warmup(10), 0.5), lambda t: min(1, t / 10)),
    "number": (s.product(2.0, 3.0), lambda t: 6.0),
    "text": (
        s.parse_schedule("0.001 * linear_warmup(10)*cosine_decay(100, 0.1)"),
        lambda t: 0.001 * min(1, t / 10) * half_cosine(t),
    ),
    "text_number": (s.parse_schedule(3e-4), lambda t: 3e-4),
    "text_default": (s.parse_schedule("rsqrt_decay"), lambda t: 0.01),
}


@pytest.mark.parametrize("name", CASES)
def test_values(name):
    schedule, formula = CASES[name]
    with Graph():
        rate = schedule(ops.placeholder("step", [], "int32"))
    assert (rate.dtype, rate.shape.names) == ("float32", ())
    found = [float(value(rate, {"step": np.int32(t)})) for t in STEPS]
    np.testing.assert_allclose(found, [formula(t) for t in STEPS], rtol=1e-12, atol=1e-18)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.1*linear_warmpu(3)", "Did you mean 'linear_warmup'"),
        ("linear_warmup(x)", "numbers"),
        ("linear_warmup(1, 2, 3)", "numbers"),
        ("cosine_decay(", "neither a number nor a schedule"),
        ("linear_warmup(0)", "positive number of steps"),
        ("noam(100, 10, 1.5)", "share of steps is 1.5"),
        ("slanted_triangular(100, 0)", "share of steps is 0"),
        ("", "neither a number nor a schedule"),
    ],
)
def test_bad_text(text, message):
    with pytest.raises(ConfigError, match=message):
        s.parse_schedule(text)
