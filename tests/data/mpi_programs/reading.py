"""Reads blocks on each rank, by ``reading FOLDER MESH LAYOUT``: the whole fetched is the batch, by fit and by hand."""

from __future__ import annotations

import sys

import numpy as np

import meshmpi as mm

if __name__ == "__main__":
    folder, shape, layout = sys.argv[1:]
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:7;io:6")
        t = mm.placeholder("t", "batch:7", "int32")
        scale = mm.get_variable("scale", "io:6", initializer=mm.ones_initializer())
        doubled = mm.multiply(x, 2.0)
        loss = mm.reduce_mean(mm.square(mm.einsum([x, scale], "batch:7") - mm.cast(t, "float32")))
        updates = mm.optimize.SGD(0.0).minimize(loss)
    mesh = mm.Mesh(shape)
    step = mm.compile(graph, mesh, layout, fetches={"loss": loss, "doubled": doubled, "t": t}, updates=updates)
    with mm.data.reader(folder, batch=7, seed=2) as data:
        expected = mm.data.reader(folder, batch=7, seed=2, prefetch=0)
        for n in range(5):
            found, whole = step(data.block(step, n)), expected.feeds(n, {"x": None, "t": None})
            np.testing.assert_array_equal(found[doubled].numpy(), 2 * whole["x"])
            np.testing.assert_array_equal(found[t].numpy(), whole["t"])
        result = mm.fit(step, data, steps=3, loss="loss", folder=f"{folder}/run", log={"plot": False})
    assert result.step == 3
