"""k-means (Lloyd's algorithm); the points are split over rows, the coordinates over cols."""

import numpy as np

import meshmpi as mm

POINTS, CLUSTERS, COORDINATES, STEPS = 300, 3, 4, 10


def main(mesh):
    """Sum of squared distances to the nearest centre, for random points around three."""
    rng = np.random.default_rng(0)
    centres = 6 * np.eye(CLUSTERS, COORDINATES)
    data = centres[np.arange(POINTS) % CLUSTERS] + rng.standard_normal((POINTS, COORDINATES))
    cluster = mm.Dimension("cluster", CLUSTERS)
    with mm.Graph() as graph:
        x = mm.placeholder("x", [("point", POINTS), ("coordinate", COORDINATES)], "float64")
        shape = [cluster, ("coordinate", COORDINATES)]
        c = mm.get_variable("c", shape, "float64", data[:CLUSTERS])
        distances = mm.reduce_sum(mm.square(x - c), reduced_dim="coordinate")
        nearest = mm.one_hot(mm.argmax(-distances, cluster), cluster, dtype="float64")
        members = mm.reduce_sum(nearest, reduced_dim="point")
        means = mm.einsum([nearest, x], shape) / mm.maximum(members, 1.0)
        spread = mm.reduce_sum(mm.reduce_min(distances, reduced_dim=cluster))
        updates = [mm.assign(c, means)]
    layout = "point:rows;coordinate:cols"
    step = mm.compile(graph, mesh, layout, fetches=[spread], updates=updates)
    return [step(x=data)[spread] for _ in range(STEPS)][-1]
