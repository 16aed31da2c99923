"""Every attack of the table fails."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import pytest

from tests.security import archive_attacks, cache_attacks, document_attacks, file_attacks, link_attacks  # noqa: F401  (each adds its rows)
from tests.security.registry import ATTACKS, Scene


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_gains_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    one = ATTACKS[name]
    if one.as_root and os.geteuid():
        pytest.skip("only root can make files of another user")
    with contextlib.ExitStack() as closing:
        gained = one.attempt(Scene(tmp_path, monkeypatch, closing))
    assert not gained, f"{name}: {gained}"


def gains_nothing(name: str) -> None:
    """The same without fixtures, for `tests.mutations`."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        test_attack_gains_nothing(name, Path(folder), patch)
