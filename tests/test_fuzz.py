"""A sample of ``python -m tests.fuzz``, which tries thousands of random graphs."""

from __future__ import annotations

import collections

import pytest

from meshmpi.kernels.native import available
from tests.fuzz.trial import trial

SAMPLES = {"some": ("numpy", 0, 8), "more": ("numpy", 8, 40), "native": ("native", 0, 3)}
"""Kernels, first and last trial of each number of ranks; generated C takes about a second to compile."""


@pytest.mark.parametrize("sample", ["some", pytest.param("more", marks=pytest.mark.matrix), "native"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_random_graphs_equal_the_oracle(ranks: int, sample: str):
    kernels, first, last = SAMPLES[sample]
    if kernels == "native" and not available():
        pytest.skip("there is no C compiler on this machine")
    found = [trial(100_000 * ranks + k, ranks, kernels=kernels) for k in range(first, last)]
    assert not [o.what for o in found if o.verdict == "wrong"]
    verdicts = collections.Counter(o.verdict for o in found)
    assert verdicts["right"] > len(found) / 2, verdicts
