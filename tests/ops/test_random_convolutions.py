"""Random convolutions in random legal layouts: values and gradients are the oracle's."""

from __future__ import annotations

import random

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.ir.convolutions import ConvDims
from meshmpi.kernels import patches
from tests import oracle
from tests.kernels.test_convolution import random_convolution
from tests.layouts import legal_layouts
from tests.ops.run import compare, result_array

MESHES = ("rows:2;cols:3", "rows:4;cols:2", "rows:5")


def built(rng: random.Random) -> tuple[mm.Graph, list[mm.Tensor]]:
    """A convolution with any strides, dilations, padding and roles of dims, and its gradients."""
    slides, types = random_convolution(rng, "float64")
    with mm.Graph() as graph:
        x, w = (mm.placeholder(n, t.shape, t.dtype) for n, t in zip("xw", types, strict=False))
        y = mm.conv(x, w, slides, types[2].shape)
        weights = mm.placeholder("weights", y.shape, "float64")
        total = mm.reduce_sum(mm.tanh(y) * weights)
        return graph, [y, *mm.gradients(total, [x, w])]


@pytest.mark.parametrize("stride", [-2, -1, 1, 2])
def test_patches_that_go_back_in_memory(stride: int):
    """Few long filters: products are large enough for BLAS, and step from the end to the start."""
    with mm.Graph() as graph:
        x = mm.placeholder("x", "d:6;q:210", "float64")
        w = mm.placeholder("w", "q:212;o:4", "float64")
        before = 2 if stride > 0 else 2 + stride
        y = mm.conv(x, w, [ConvDims("q", "q", "t", stride=stride, before=before)], "t:2;d:6;o:4")
        wanted = [y, *mm.gradients(mm.reduce_sum(mm.square(y)), [x, w])]
    numbers = np.random.default_rng(0)
    feeds = {n: numbers.uniform(-1, 1, t.shape.sizes) for n, t in graph.placeholders.items()}
    expected = oracle.evaluate(graph, wanted, feeds)
    got = mm.compile(graph, mm.SimulatedMesh(""), fetches=wanted, kernels="numpy")(feeds)
    for t, want in zip(wanted, expected, strict=True):
        compare(result_array(got[t]), want, t.dtype, 1e-12, t.name)


@pytest.mark.parametrize("seed", range(30))
def test_random_convolution_in_random_layouts(seed: int, monkeypatch: pytest.MonkeyPatch):
    rng = random.Random(seed)
    monkeypatch.setattr(patches, "PATCH_ELEMENTS", rng.choice([4, 30, 1 << 18]))
    monkeypatch.setattr(patches, "POINTS", rng.choice([2, 1 << 15]))
    graph, wanted = built(rng)
    numbers = np.random.default_rng(seed)
    feeds = {n: numbers.uniform(-1, 1, t.shape.sizes) for n, t in graph.placeholders.items()}
    expected = oracle.evaluate(graph, wanted, feeds)
    mesh = mm.SimulatedMesh(rng.choice(MESHES))
    layouts = legal_layouts(graph, mesh.shape, 40)
    for layout in rng.sample(layouts, min(4, len(layouts))):
        step = mm.compile(graph, mesh, layout, fetches=wanted, kernels="numpy", optimize=rng.random() < 0.6)
        got = step(feeds)
        for t, want in zip(wanted, expected, strict=True):
            what = f"'{layout}' on {mesh.shape}: {t.name}"
            compare(result_array(got[t]), want, t.dtype, 1e-12, what)
