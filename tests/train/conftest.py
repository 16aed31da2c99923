"""What the tests that train share."""

from pathlib import Path

import pytest

from tests.train.small import TEXT


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, and the small text."""
    monkeypatch.setenv("MESHMPI_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "cache"
