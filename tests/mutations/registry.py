"""The list of seeded bugs, and how one is put into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

Patch = pytest.MonkeyPatch


class Mutation(NamedTuple):
    """One plausible mistake.

    Attributes:
        room: The file of this folder that it is in.
        put: Puts it in by monkeypatch.
        shows_in: The row of the table (or check of `tests.mutations.run`) tried first, which was
            seen to catch it; the others follow where it does not.
    """

    room: str
    put: Callable[[Patch], None]
    shows_in: str


MUTATIONS: dict[str, Mutation] = {}
"""Name -> mutation.  The name says what the mistake is."""


def mutation(shows_in: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Adds the decorated function to the list."""

    def register(put: Callable[[Patch], None]) -> Callable[[Patch], None]:
        assert put.__name__ not in MUTATIONS, put.__name__
        MUTATIONS[put.__name__] = Mutation(put.__module__.rsplit(".", 1)[-1], put, shows_in)
        return put

    return register
