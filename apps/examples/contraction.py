"""Quantum chemistry: the MP2 correlation energy from integrals in factorised form.

(ia|jb) = sum over p of b[p,i,a] b[p,j,b]
energy = sum of (ia|jb) (2 (ia|jb) - (ib|ja)) / (e[i] + e[j] - e[a] - e[b])
i and a are split over one axis each; the second copies of both dimensions are whole.
"""

import numpy as np

import meshmpi as mm

AUXILIARY, OCCUPIED, VIRTUAL = 40, 6, 15


def main(mesh):
    """The energy, for random integrals and orbital energies."""
    with mm.Graph() as graph:
        b = mm.placeholder("b", [("p", AUXILIARY), ("i", OCCUPIED), ("a", VIRTUAL)], "float64")
        ei = mm.placeholder("ei", [("i", OCCUPIED)], "float64")
        ea = mm.placeholder("ea", [("a", VIRTUAL)], "float64")
        ej, eb = mm.rename(ei, {"i": "j"}), mm.rename(ea, {"a": "b"})
        pairs = [("i", OCCUPIED), ("a", VIRTUAL), ("j", OCCUPIED), ("b", VIRTUAL)]
        direct = mm.einsum([b, mm.rename(b, {"i": "j", "a": "b"})], pairs)
        exchange = mm.einsum([mm.rename(b, {"a": "b"}), mm.rename(b, {"i": "j"})], pairs)
        gaps = mm.subtract(ei + ej, ea + eb, output_shape=pairs)
        energy = mm.reduce_sum(direct * (2.0 * direct - exchange) / gaps)
    step = mm.compile(graph, mesh, "i:rows;a:cols", fetches=[energy])
    rng = np.random.default_rng(0)
    levels = {"ei": rng.uniform(-2, -1, OCCUPIED), "ea": rng.uniform(1, 2, VIRTUAL)}
    return step(b=rng.standard_normal((AUXILIARY, OCCUPIED, VIRTUAL)) / 10, **levels)[energy]
