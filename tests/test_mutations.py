"""Every seeded bug of tests/mutations is caught by the table: at once by the case that it names.

``python -m tests.mutations`` shows how each is caught.
"""

from __future__ import annotations

import pytest

from tests.mutations import MUTATIONS
from tests.mutations.run import caught, run_fast_part


def test_the_fast_part_passes_without_a_mutation():
    run_fast_part()


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(name: str):
    found = caught(MUTATIONS[name])
    assert found is not None, f"{name} survives: add the row that shows it"


def test_there_are_enough_mutations():
    assert len(MUTATIONS) >= 150
