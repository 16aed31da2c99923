"""The benchmark of matrix products runs and counts every one of them."""

from __future__ import annotations

import pytest

from apps.bench import gemm

TINY = [
    "model.vocab=32",
    "model.length=8",
    "model.d_model=16",
    "model.d_ff=24",
    "model.heads=2",
    "model.d_kv=8",
    "model.layers=1",
    "train.batch=4",
]


def settings() -> gemm.Settings:
    return gemm.config.load(gemm.Settings, gemm.CONFIG, TINY)


@pytest.mark.parametrize("layout", gemm.LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tables(layout: str, dtype: str):
    program = gemm.training_program(settings(), gemm.LAYOUTS[layout], 2)
    lines = gemm.report(program, dtype, 1, each=True)
    title = next(n for n, line in enumerate(lines) if "min ms" in line)
    times = {line[:18].strip(): float(line[18:27]) for line in lines[title + 1 :]}
    assert "matmul" in times
    assert all(ms >= 0 for ms in times.values())
    counted = sum(gemm.contracts(program).values())
    assert counted == program.counts()["contract"]


def test_sizes_of_a_product():
    program = gemm.training_program(settings(), gemm.LAYOUTS["data-parallel"], 2)
    texts = list(gemm.contracts(program))
    sizes = [gemm._sizes(call) for call in gemm._calls(program)]
    assert "[batch=2 length=8 d_model=16] [d_model=16 heads=2 d_kv=8]" in texts[0]
    assert sizes[0] == (1, 16, 16, 16)
