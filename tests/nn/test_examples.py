"""The examples in the docstrings of meshmpi.nn run, and say what they print."""

import doctest
import importlib
import pkgutil

import pytest

import meshmpi as mm
from meshmpi import nn

MODULES = [m.name for m in pkgutil.walk_packages(nn.__path__, "meshmpi.nn.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, extraglobs={"mm": mm})
    assert failed == 0
