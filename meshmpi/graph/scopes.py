"""Scopes: name prefixes, and whether a variable with an existing name is shared.

Names only: no graph, no tensors.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple

Reuse = bool | Literal["auto"]
"""What happens to a variable of which the name exists (False: an error; True: it is shared), and
to one of which it does not (True: an error; False and "auto": it is made)."""
Mark = Mapping[str, int]
"""Where in the order of unnamed layers a graph is: full default name -> how many there were."""


class _Scope(NamedTuple):
    prefix: str
    reuse: Reuse
    counts: dict[str, int]  # unnamed layers since reuse was switched on; inner scopes share it
    part: str = ""  # prefix of operations, not of variables


class Scopes:
    """The scopes that are open, and every name taken by a variable or layer so far."""

    def __init__(self) -> None:
        self._open = [_Scope("", False, {})]
        self._taken: set[str] = set()
        self._unnamed: dict[str, list[str]] = {}

    @property
    def reuse(self) -> Reuse:
        """What the innermost scope says."""
        return self._open[-1].reuse

    def full(self, name: str) -> str:
        """``name`` with the prefix of the open scopes."""
        return self._open[-1].prefix + name

    def operation(self, base: str) -> str:
        """``base`` with the prefixes of the open scopes and of the part of a layer."""
        return self.full(self._open[-1].part + base)

    @contextmanager
    def part(self, name: str) -> Generator[None, None, None]:
        """Operations made inside are a part of a layer: ``name/`` stands before their names, not before variables'."""
        self._open.append(self._open[-1]._replace(part=f"{name}/"))
        try:
            yield
        finally:
            self._open.pop()

    @contextmanager
    def opened(self, name: str, reuse: Reuse | None, since: Mark | None = None) -> Generator[None, None, None]:
        """A scope inside the current one.

        Args:
            name: Prefix of names made inside; empty: none.
            reuse: None: as outside.
            since: The n-th unnamed layer made inside is the n-th after this mark; default: after the beginning.
        """
        outer = self._open[-1]
        prefix = f"{outer.prefix}{name}/" if name else outer.prefix
        if reuse is None:
            self._open.append(_Scope(prefix, outer.reuse, outer.counts))
        else:
            self._open.append(_Scope(prefix, reuse, dict(since or {})))
        try:
            yield
        finally:
            self._open.pop()

    def mark(self) -> Mark:
        """Where the unnamed layers are now, for ``since``."""
        reuse, counts = self.reuse, self._open[-1].counts
        return {full: counts.get(full, 0) if reuse else len(names) for full, names in self._unnamed.items()}

    def take(self, full: str) -> None:
        """Notes a name and the scopes in it, so that no unnamed layer gets one of them."""
        while full and full not in self._taken:
            self._taken.add(full)
            full = full.rpartition("/")[0]

    def layer_name(self, name: str | None, default: str) -> str:
        """The name of a layer in the current scope.

        Args:
            name: As the user gave it, or None.
            default: What an unnamed layer of this kind is called: the second ``default_1``, then
                ``default_2``; where variables are reused, what it was called the first time.
        """
        if name is not None:
            return name
        full, scope = self.full(default), self._open[-1]
        names = self._unnamed.setdefault(full, [])
        place = scope.counts.get(full, 0) if scope.reuse else len(names)
        scope.counts[full] = place + 1
        if place == len(names):
            names.append(self._free(default))
        return names[place]

    def _free(self, default: str) -> str:
        name, n = default, 0
        while self.full(name) in self._taken:
            n += 1
            name = f"{default}_{n}"
        self.take(self.full(name))
        return name
