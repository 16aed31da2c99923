"""What C[i, k] = sum over j of A[i, j] B[j, k] and both gradients cost per rank, by hand.

Only sizes, a layout and a mesh shape enter; no program.  The volumes are derived here from first
principles, not copied from the paper's Appendix B.  The three products are alike:

    C  = A  B    lacks j:  summed over j   [i, k]
    dA = dC B'   lacks k:  summed over k   [i, j]
    dB = A' dC   lacks i:  summed over i   [j, k]

Each dimension is in two of the three matrices and absent from the third.  With it split over n
ranks, those two are split with it and the third is whole on all n, as partial sums that one
all_reduce must add: a matrix is replicated, and reduced, exactly over the axes of the dimension
that it lacks.  With I, J, K the sizes of the (largest) blocks, a rank therefore multiplies
3 x 2 I J K FLOP, hands I K elements to an all_reduce over the axes of j, I J over those of k and
J K over those of i, and keeps blocks of A, B, C and dC.  A ring all_reduce over n ranks sends
2 (n - 1) / n times its bytes, which is the least possible (Patarasuk and Yuan 2009).

So with n ranks and equal sizes s: a 1-D partitioning sends about 2 s^2 per rank whatever n is, a
2-D one 2 x 2 s^2 / sqrt(n) and a 3-D one 3 x 2 s^2 / n^(2/3).
"""

from __future__ import annotations

from typing import NamedTuple

from meshmpi.dims import Axes, Layout, MeshShape


class Sizes(NamedTuple):
    """Global sizes of the three dimensions."""

    i: int = 64
    j: int = 48
    k: int = 96


class Product(NamedTuple):
    """One of the three products.

    Attributes:
        lacks: The dimension that is summed out.
    """

    name: str
    dims: str
    lacks: str


PRODUCTS = (Product("C", "ik", "j"), Product("dA", "ij", "k"), Product("dB", "jk", "i"))


class Volume(NamedTuple):
    """What one product sends per rank.

    Attributes:
        product: Which.
        over: Mesh axes of the all_reduce; none: nothing is sent.
        ranks: In one group over them.
        elements: Handed to the all_reduce.
        bytes_sent: By a ring, rounded down to whole bytes.
    """

    product: Product
    over: Axes
    ranks: int
    elements: int
    bytes_sent: int


class Formulas(NamedTuple):
    """Costs on the rank with the largest blocks."""

    flops: int
    kept_elements: dict[str, int]
    volumes: list[Volume]


def formulas(sizes: Sizes, layout: Layout, mesh: MeshShape, item_bytes: int) -> Formulas:
    """Evaluates the formulas of this module for one layout."""
    block = {d: -(-n // mesh.count(layout.axes(d))) for d, n in sizes._asdict().items()}
    volumes = []
    for product in PRODUCTS:
        over = mesh.in_mesh_order(layout.axes(product.lacks))
        n = mesh.count(over)
        elements = block[product.dims[0]] * block[product.dims[1]] if over else 0
        sent = 2 * (n - 1) * elements * item_bytes // n
        volumes.append(Volume(product, over, n, elements, sent))
    kept = {"A": "ij", "B": "jk", "dC": "ik"}
    return Formulas(
        flops=3 * 2 * block["i"] * block["j"] * block["k"],
        kept_elements={name: block[a] * block[b] for name, (a, b) in kept.items()},
        volumes=volumes,
    )


def partitionings(mesh: MeshShape) -> list[tuple[str, str]]:
    """(name, layout) of every way to put i, j and k on the axes of the mesh.

    1-D: one dimension over all axes.  2-D: one over the first axis, another over the rest.  3-D:
    over the first, the second and the rest; each as far as the mesh has so many axes.
    """
    names = mesh.names
    every = "+".join(names)
    found = [(f"1-D, {d} split", f"{d}:{every}") for d in "ijk"]
    if len(names) >= 2:
        rest = "+".join(names[1:])
        pairs = [(whole, *(d for d in "ijk" if d != whole)) for whole in "jki"]
        found += [(f"2-D, {w} whole", f"{a}:{names[0]};{b}:{rest}") for w, a, b in pairs]
    if len(names) >= 3:
        found.append(("3-D", f"i:{names[0]};j:{names[1]};k:{'+'.join(names[2:])}"))
    return [("whole", ""), *found]
