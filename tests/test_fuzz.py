"""A sample of ``python -m tests.fuzz``, which tries thousands of random graphs."""

from __future__ import annotations

import collections

import pytest

from meshmpi.kernels.native import available
from tests.fuzz.trial import trial

SAMPLES = {"numpy": 8, "native": 2}
"""Trials of one test by kernels; generated C takes about a second to compile."""


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("kernels", SAMPLES)
def test_random_graphs_equal_the_oracle(ranks: int, kernels: str):
    if kernels == "native" and not available():
        pytest.skip("there is no C compiler on this machine")
    first = 100_000 * ranks
    found = [trial(first + k, ranks, kernels=kernels) for k in range(SAMPLES[kernels])]
    assert not [o.what for o in found if o.verdict == "wrong"]
    verdicts = collections.Counter(o.verdict for o in found)
    assert verdicts["right"] > len(found) / 2, verdicts
