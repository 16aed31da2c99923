"""The order of rows: every epoch is a permutation, another one, the same for everybody."""

from __future__ import annotations

import numpy as np
import pytest

from meshmpi.data.order import rows_at


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 100, 1000, 4097])
def test_every_epoch_is_another_permutation(count):
    epochs = [rows_at(np.arange(e * count, (e + 1) * count), count, seed=7) for e in range(3)]
    for rows in epochs:
        assert sorted(rows.tolist()) == list(range(count))
    if count > 16:
        assert (epochs[0] != epochs[1]).any() and (epochs[0] != np.arange(count)).any()
        assert (epochs[0] != rows_at(np.arange(count), count, seed=8)).any()


def test_any_part_of_an_epoch_can_be_asked_for():
    whole = rows_at(np.arange(250), 100, seed=1)
    for begin, end in ((0, 7), (95, 105), (99, 201), (60, 60)):
        np.testing.assert_array_equal(rows_at(np.arange(begin, end), 100, seed=1), whole[begin:end])
    np.testing.assert_array_equal(rows_at(np.arange(250), 100, None), np.arange(250) % 100)


def test_rows_are_well_mixed():
    """Where a row stands says nothing about it: every tenth of the rows is spread over every tenth of the places."""
    rows = rows_at(np.arange(10_000), 10_000, seed=3)
    counts = np.histogram2d(np.arange(10_000), rows, bins=10)[0]
    assert counts.min() > 60 and counts.max() < 140  # 100 expected, deviation 9.5
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.05
