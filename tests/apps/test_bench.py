"""The benchmark of the loops of a step runs, at a tiny size."""

from __future__ import annotations

import pytest

from apps.bench import primitives
from meshmpi.kernels.native import available


def test_every_row_of_the_primitives(capsys: pytest.CaptureFixture[str], monkeypatch):
    rows = [r._replace(rows=2, columns=8) for r in primitives.ROWS]
    monkeypatch.setattr(primitives, "ROWS", rows)
    monkeypatch.setattr(primitives, "KERNELS", ("numpy",))  # a build per row would take seconds
    primitives.main(["--repeats", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(rows) + 1
    assert all(float(line.split()[-1]) > 0 for line in lines[1:])


@pytest.mark.skipif(not available(), reason="there is no C compiler")
def test_one_row_with_generated_kernels(capsys: pytest.CaptureFixture[str]):
    primitives.main(["--repeats", "1", "--scale", "0.01", "--only", "Adam"])
    *_, native, ratio = capsys.readouterr().out.splitlines()[1].split()
    assert float(native) > 0
    assert float(ratio.removesuffix("x")) > 0
