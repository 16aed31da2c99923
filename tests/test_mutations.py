"""Every seeded bug of tests/mutations is caught by the table: at once by the case that it names.

``python -m tests.mutations`` shows how each is caught.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from meshmpi.launch.launch import launch
from tests.mutations import MUTATIONS
from tests.mutations.run import caught, run_fast_part

ROOT = Path(__file__).parent.parent


def test_the_fast_part_passes_without_a_mutation():
    run_fast_part()


@pytest.mark.quick(15)
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(name: str):
    found = caught(MUTATIONS[name])
    assert found is not None, f"{name} survives: add the row that shows it"


@pytest.mark.matrix
def test_mutations_of_collectives_by_mpi_are_caught():
    done = launch(4, ["-m", "tests.mutations.mpi_program"], timeout_seconds=120, capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.strip().splitlines()
    assert lines[0] == "nothing: nothing is wrong" and len(lines) > 12
    assert not [line for line in lines if "SURVIVES" in line]
