"""Ranks that are fed different arrays for what they all hold: refused, before they drift apart."""

from __future__ import annotations

import pytest

from meshmpi.launch.launch import launch


@pytest.mark.quick(1)
@pytest.mark.parametrize(("ranks", "refused"), [(2, 8), (4, 14)])
def test_different_values_of_one_block_are_refused(tmp_path, ranks, refused):
    done = launch(
        ranks, ["-m", "tests.runtime.mpi_programs.feeds", str(tmp_path)], timeout_seconds=120, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) == refused
