"""The largest eigenvalue of a symmetric matrix by power iteration; all ranks share its rows."""

import numpy as np

import meshmpi as mm

SIZE, STEPS = 100, 200


def main(mesh):
    """The eigenvalue, for a random matrix."""
    noise = np.random.default_rng(0).standard_normal((SIZE, SIZE))
    matrix = noise + noise.T + 30 * np.outer(noise[0], noise[0]) / SIZE
    with mm.Graph() as graph:
        a = mm.get_variable("a", [("row", SIZE), ("column", SIZE)], "float64", matrix)
        x = mm.get_variable("x", [("column", SIZE)], "float64", np.ones(SIZE))
        y = mm.einsum([a, x], [("row", SIZE)])
        eigenvalue = mm.einsum([mm.rename(y, {"row": "column"}), x], []) / mm.reduce_sum(x * x)
        longer = mm.rename(y, {"row": "column"})
        updates = [mm.assign(x, longer * mm.rsqrt(mm.reduce_sum(longer * longer)))]
    layout = "row:rows+cols"
    step = mm.compile(graph, mesh, layout, fetches=[eigenvalue], updates=updates)
    for _ in range(STEPS):
        found = step()[eigenvalue]
    return found
