"""A pytest plugin that hides frames of meshmpi in its errors.

Name it in a ``conftest.py``: ``pytest_plugins = ["meshmpi.guard.pytest_plugin"]``; or give ``-p
meshmpi.guard.pytest_plugin`` to pytest.
"""

from __future__ import annotations

import pytest

from meshmpi.errors import MeshmpiError, without_library


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> None:
    """Shortens the traceback before pytest makes its report of it."""
    if call.excinfo is not None and isinstance(call.excinfo.value, MeshmpiError):
        error = call.excinfo.value
        shown = error.with_traceback(without_library(error, error.__traceback__))
        call.excinfo = pytest.ExceptionInfo.from_exception(shown)
