"""On real ranks: different values for a block that several of them hold are refused on all.

``python -m tests.runtime.mpi_programs.feeds FOLDER``; rank 0 prints how many were refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import numpy as np

import meshmpi as mm
from meshmpi import checkpoint
from meshmpi.errors import CheckpointError, FeedError
from meshmpi.runtime.world import world_size

X = np.arange(24, dtype=np.float32).reshape(6, 4)
N = np.arange(1, 7, dtype=np.int32)


def layouts(ranks: int) -> Iterator[tuple[str, str]]:
    """Each with an axis that some feed is not split over."""
    yield f"a:{ranks}", ""
    yield f"a:{ranks}", "io:a"
    if ranks == 4:
        yield "a:2;b:2", "batch:a"
        yield "a:2;b:2", "batch:a;io:b"
        yield "a:4", "batch:a"


def compiled(mesh: mm.Mesh, layout: str, debug: bool = False) -> mm.CompiledStep:
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:6;io:4")
        n = mm.placeholder("n", "batch:6", "int32")
        rate = mm.placeholder("rate", "")
        h = mm.dense(x, mm.Dimension("out", 3)) * mm.cast(n, "float32") * rate
        loss = mm.reduce_mean(mm.square(h))
        updates = mm.optimize.SGD(1e-4).minimize(loss)
    return mm.compile(graph, mesh, layout, fetches=[loss], updates=updates, debug=debug)


def refused(call: Callable[[], object], kind: type[Exception], *words: str) -> int:
    try:
        call()
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{missing} not in {error}"
        return 1
    raise AssertionError(f"nothing was refused: {words}")


def fed_differently(step: mm.CompiledStep, name: str, rank: int) -> dict[str, np.ndarray]:
    """Feeds of which one element of one rank's is another, in a block that others hold too."""
    feeds = {"x": X.copy(), "n": N.copy(), "rate": np.float32(1)}
    if step.mesh.rank == rank:
        index = tuple(start for start, _ in step.feed_block(name))
        feeds[name] = np.array(feeds[name])
        feeds[name][index] += 50
    return feeds


def tried(mesh: mm.Mesh, layout: str) -> int:
    found = 0
    for name in ("x", "n", "rate"):
        step = compiled(mesh, layout)
        t = step.program.feeds[name]
        group = [a for a, size in mesh.shape.axes if a not in t.used_axes and size > 1]
        last = mesh.shape.size - 1
        feeds = fed_differently(step, name, last)
        before = step.variables["dense/kernel"]
        if not group:  # nobody else has this block: there is nothing to compare
            step(feeds)
            continue
        words = (f"feed '{name}'", f"on rank {last}", "seed random numbers alike")
        found += refused(lambda s=step, f=feeds: s(f), FeedError, *words)
        np.testing.assert_array_equal(step.variables["dense/kernel"], before)
        assert step.step_number == 0
    return found


def later(mesh: mm.Mesh, folder: str) -> int:
    """Different in the second call: in debug mode refused, else when the variables are saved."""
    good = {"x": X, "n": N, "rate": np.float32(1)}
    careful, quick = compiled(mesh, "", debug=True), compiled(mesh, "")
    careful(good)
    bad = fed_differently(careful, "x", 1)
    found = refused(lambda: careful(bad), FeedError, "feed 'x'", "[batch=0, io=0]", "50.0 on rank 1")
    quick(good)
    checkpoint.save(folder, quick.variables, 1, {})
    quick(bad)
    words = ("variable 'dense/kernel'", "debug=True")
    found += refused(lambda: checkpoint.save(folder, quick.variables, 2, {}), CheckpointError, *words)
    saver = checkpoint.BackgroundSaver(folder, quick.variables)
    found += refused(lambda: saver.start(2, {}), CheckpointError, *words)
    assert [path.name for path in checkpoint.find(folder)] == ["step-00000001"]
    return found


def blocks(mesh: mm.Mesh) -> None:
    """Own blocks of a feed that is split may be anything; compared is what is held twice."""
    step = compiled(mesh, "batch:a")
    here = mm.local(X[slice(*step.feed_block("x")[0])] + mesh.rank)
    n = mm.local(N[slice(*step.feed_block("n")[0])])
    step(x=here, n=n, rate=np.float32(1))


def main() -> None:
    ranks, count = world_size(), 0
    for shape, layout in layouts(ranks):
        with mm.Mesh(shape) as mesh:
            count += tried(mesh, layout)
    with mm.Mesh(f"a:{ranks}") as mesh:
        count += later(mesh, sys.argv[1])
        blocks(mesh)
        if mesh.rank == 0:
            print(count)


if __name__ == "__main__":
    main()
