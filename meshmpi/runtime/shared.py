"""Shared memory between the ranks of a host, and collectives that read the other ranks' data in place.

A region has one part per rank of the host, all of the same size, each in unnamed memory that its rank made: nothing
remains when the rank is killed. All ranks run the same program with the same plan, so a value has the same offset in
every part. `shared.c` has the collectives; they combine blocks in rank order. If memory cannot be mapped, or there is
no C compiler, collectives use MPI.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import mmap
import operator
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from meshmpi.dims import block_range, block_sizes
from meshmpi.ir.halos import pieces_to, unfilled_positions
from meshmpi.kernels.native.compiler import CompilerError, load_library
from meshmpi.kernels.steps import Bound, nothing, run_all
from meshmpi.kernels.views import collapse
from meshmpi.runtime.calls import Place, SelfRecording, Tally
from meshmpi.runtime.collectives import Group
from meshmpi.runtime.lanes import Divisible, Lanes, block_shapes, combining, divided, exchange, reduction_bytes
from meshmpi.runtime.operands import (
    OPS,
    AllGather,
    AllReduce,
    AllToAll,
    ReduceScatter,
    Shift,
    block,
    piece_source,
    piece_target,
    replaced,
    starts,
)

LINE_BYTES = 64
SLOT_BYTES = 256
"""An all_reduce of at most this size goes through slots: one barrier, and each rank combines everything."""
CHUNK_BYTES = 32 << 20
"""Arrays of less than half of this share regions of this size; pages that nobody touches take no memory."""
PART_ELEMENTS = 64
"""The parts of an all_reduce begin at multiples of this, so that no two ranks write the same cache line."""
PAST_CACHE_BYTES = 12 << 20
"""Where a result that replaces none of its inputs and what it is made of are at least this, it is written past caches.

Measured for copies (Xeon, 2 MB of second-level cache a core; time of the copy and of reading its result, over
that through the caches): result of 1 MB 1.9, 4 MB 0.94, 16 MB 0.73, 64 MB 0.67.
"""
PAST_CACHE_RUN = 256
"""Shorter runs of a strided copy go through the caches: parts of lines at their ends would cost more than is saved."""
SPINS, SPINS_SHARING = 20000, 50
"""How often a rank looks for the others before it gives its core away (about 1 ms); where ranks share cores."""
SHARED_VARIABLE = "MESHMPI_SHARED"
"""``off``: all collectives go through MPI."""
SOURCE = Path(__file__).with_name("shared.c")

_TYPES = {t: n for n, t in enumerate(("float64", "float32", "bfloat16", "int64", "int32", "uint8"))}
_BOOL_OPS = {"sum": "max", "max": "max", "min": "min", "prod": "min"}
_LOOPS = 5


def _record(*names: str, loops: Sequence[str] = ()) -> np.dtype:
    return np.dtype([(n, "i8") for n in names] + [(n, "i8", _LOOPS) for n in loops])


# The structures of shared.c.
_GROUP = _record("ranks", "me", "spins", "epoch", "calls", "flags", "slots", "slot_bytes")
_COPY = _record("to", "from", "bytes", "past_cache", loops=("n", "to_step", "from_step"))
_SIZES = ("rows", "count", "from_step", "to_step", "type", "op", "sources", "targets", "past_cache")
_REDUCTION = _record(*_SIZES, "from", "to")
_RECORD = np.dtype([(n, "i8") for n in (*Place._fields, "calls")] + [("seconds", "f8")])
_COLLECTIVE = _record("group", "record", "copies", "reductions", "copy", "reduction", "small")


def _address(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


class Region:
    """Memory of this rank that others map, and the same of theirs at equal offsets.

    It ends with the last array that lies in it on this rank; the others keep what they have mapped.

    Attributes:
        begin, nbytes: Where this rank's part lies.
        parts: Rank of the mesh -> the bytes of another rank.
    """

    def __init__(self, begin: int, nbytes: int, parts: dict[int, np.ndarray]):
        self.begin, self.nbytes, self.parts = begin, nbytes, parts

    def of(self, rank: int, x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """What a rank holds at the place of ``x``, an array of this rank."""
        if rank not in self.parts:
            return x
        offset, nbytes = _address(x) - self.begin, math.prod(shape) * x.itemsize
        return self.parts[rank][offset : offset + nbytes].view(x.dtype).reshape(shape)


class SharedMemory:
    """The memory that this rank shares with the others of its host.

    Making it is collective over the mesh, `region` over the ranks of the host.

    Args:
        comm: The ranks of the mesh that share a host with this one, by rank.
        ranks: Their ranks in the mesh.
        sets: Number of sets of mesh axes that a group may have.
        library: Of shared.c.
        cores: How many they may run on together.
    """

    def __init__(self, comm: MPI.Intracomm, ranks: Sequence[int], sets: int, library: ctypes.CDLL, cores: int):
        self.comm, self.ranks, self.rank = comm, tuple(ranks), ranks[comm.rank]
        self._run = library.meshmpi_shared_collective
        self._run.argtypes, self._run.restype = [ctypes.c_void_p], None
        self._regions: dict[int, Region] = {}
        self._groups: dict[int, np.ndarray] = {}
        self._kept: list[np.ndarray] = []
        self._chunk = np.empty(0, np.uint8)
        self._spins = SPINS if len(ranks) <= cores else SPINS_SHARING
        own = self._region(sets * (LINE_BYTES + 2 * SLOT_BYTES))
        region = self.region_of(own)
        assert region is not None
        self._control = {self.rank: own, **region.parts}

    # ---- memory ----------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> np.ndarray:
        """Zeros on a cache line, at the same place on all ranks of the host.  Collective over these ranks.

        Args:
            nbytes: May differ from rank to rank.

        Raises:
            OSError: The memory of a rank cannot be mapped by another.
        """
        most = -(-self.comm.allreduce(nbytes, MPI.MAX) // LINE_BYTES) * LINE_BYTES
        if most > CHUNK_BYTES // 2:
            return self._region(most)[:nbytes]
        if most > self._chunk.nbytes:
            self._chunk = self._region(CHUNK_BYTES)
        found, self._chunk = self._chunk[:nbytes], self._chunk[most:]
        return found

    def _region(self, nbytes: int) -> np.ndarray:
        """This rank's part of a new region."""
        fd, inode, problem, parts = -1, 0, "", dict[int, np.ndarray]()
        try:
            fd = os.memfd_create("meshmpi", os.MFD_CLOEXEC)
            os.ftruncate(fd, nbytes)
            inode = os.fstat(fd).st_ino
        except (AttributeError, OSError) as e:
            problem = str(e)
        offered = self.comm.allgather((os.getpid(), fd, inode, problem))
        problem = next((p for *_, p in offered if p), "")
        try:
            for rank, (pid, number, theirs, _) in zip(self.ranks, () if problem else offered, strict=not problem):
                path = fd if rank == self.rank else f"/proc/{pid}/fd/{number}"
                parts[rank] = np.frombuffer(_mapped(path, theirs, nbytes), np.uint8)
        except OSError as e:
            problem = str(e)
        problems = [p for p in self.comm.allgather(problem) if p]  # now all have opened what they need
        if fd >= 0:
            os.close(fd)
        if problems:
            raise OSError(problems[0])
        own = parts.pop(self.rank)
        begin = _address(own)
        self._regions[begin] = Region(begin, nbytes, parts)
        weakref.finalize(_owner(own), self._regions.pop, begin).atexit = False
        return own

    def held_by(self, rank: int, x: np.ndarray) -> np.ndarray:
        """What another rank holds at the place of bytes that this one got of `allocate`."""
        region = self.region_of(x)
        assert region is not None
        return region.of(rank, x, x.shape)

    def region_of(self, x: np.ndarray) -> Region | None:
        """The region that an array of this rank lies in."""
        at = _address(x)
        inside = (r for r in self._regions.values() if r.begin <= at and at + x.nbytes <= r.begin + r.nbytes)
        return next(inside, None)

    # ---- collectives -----------------------------------------------------------------------------

    def group(self, number: int, members: Sequence[int]) -> int:
        """Address of what this rank knows of a group, the ``number``-th set of axes; it is kept."""
        if number not in self._groups:
            at = number * (LINE_BYTES + 2 * SLOT_BYTES)
            begins = np.array([_address(self._control[r]) + at for r in members], np.int64)
            flags, slots = begins, begins + LINE_BYTES
            row, me = np.zeros(1, _GROUP), members.index(self.rank)
            row[0] = (len(members), me, self._spins, 0, 0, _address(flags), _address(slots), SLOT_BYTES)
            self._groups[number] = row
            self._kept += [flags, slots]
        return _address(self._groups[number])

    def bind(self, number: int, members: Sequence[int], group: Group, call: Any) -> Bound | None:
        """A collective by shared memory; None where its arrays are not in it, or it has no kernel.

        Args:
            number: Which set of mesh axes the group is over.
            members: Ranks of the group, all on this host, ascending.
            group: The blocks of the members.
            call: One of `meshmpi.runtime.operands`, checked.
        """
        work = _Work(self, members, group)
        work.kept.append(call)  # its arrays
        plan = {AllReduce: _all_reduce, ReduceScatter: _reduce_scatter, AllGather: _all_gather}
        plan |= {AllToAll: _all_to_all, Shift: _shift}
        return self._bound(work, self.group(number, members)) if plan[type(call)](work, call) else None

    def bind_lanes(self, number: int, lanes: Lanes, x: np.ndarray, reduce: Callable[[np.ndarray], Bound]) -> Bound:
        """An all_reduce over ranks of several hosts: inside each, between equal lanes of all, inside each.

        Every rank of a lane combines its part of what the ranks of its host hold, then the parts of all hosts; then
        each takes the parts of its neighbours.  What crosses the network crosses it once.

        Args:
            number: Which set of mesh axes the group is over.
            lanes: Of the group.
            x: Reduced in place; in memory that is shared.
            reduce: Binds an all_reduce of an array over the lane of this rank.
        """
        inside = _Work(self, lanes.here, None)
        xs = inside.of_all(x, [x.shape] * len(lanes.here)) or []
        parts = starts([PART_ELEMENTS * k for k in block_sizes(-(-x.size // PART_ELEMENTS), lanes.split.count)])
        flat = [one.reshape(1, -1) for one in xs]
        mine, steps = lanes.here.index(self.rank), list[Bound]()
        back = _Work(self, lanes.here, None)
        back.kept = inside.kept = [*inside.kept, x]
        for lane, (first, end) in enumerate(itertools.pairwise(parts)):
            if lane != mine:
                back.copy(flat[mine][:, first:end], flat[lane][:, first:end])
                continue
            inside.reduce(lanes.op, [flat[mine][:, first:end]], [one[:, first:end] for one in flat])
            part = x.reshape(-1)[first:end]
            steps.append(reduce(part) if part.size else nothing)
        group = self.group(number, lanes.here)
        first_step, last = (self._bound(work, group).recorded(None, Tally()) for work in (inside, back))
        return run_all([first_step, *steps, last])

    def can_divide(self, lanes: Lanes, call: Any) -> bool:
        """Whether this rank can take part in a collective by lanes: its arrays are shared, its scratch is enough."""
        arrays = (getattr(call, name) for name in ("x", "out") if hasattr(call, name))
        if any(self.region_of(x) is None for x in arrays):
            return False
        given = getattr(call, "workspace", None)
        if given is None or not isinstance(call, ReduceScatter):
            return True
        return reduction_bytes(call, lanes.split) <= given.nbytes

    def bind_divided(self, number: int, lanes: Lanes, lane: MPI.Comm, call: Divisible) -> Bound:
        """An all_gather or reduce_scatter over ranks of several hosts, see `meshmpi.runtime.lanes`.

        Args:
            number: Which set of mesh axes the group is over.
            lanes: Of the group.
            lane: The ranks of the own lane, by host; MPI.COMM_NULL without one.
            call: Of which `can_divide` is true on all ranks.
        """
        before, after = (_Work(self, lanes.here, None) for _ in range(2))
        shapes = [block_shapes(call, b) for b in lanes.split.blocks]
        held = (before.of_all(x, s) or [] for x, s in zip((call.x, call.out), zip(*shapes, strict=True), strict=True))
        xs, outs = (dict(zip(lanes.split.blocks, arrays, strict=True)) for arrays in held)
        steps = divided(call, lanes.split, xs, outs)
        op = getattr(call, "op", "")
        for to, sources in steps.sums:
            before.reduce(op, [to], sources)
        for to, source in steps.copies:
            after.copy(to, source, call.out.nbytes)
        before.kept += [call, steps]
        after.kept = before.kept
        group = self.group(number, lanes.here)
        first_step, last = (self._bound(work, group).recorded(None, Tally()) for work in (before, after))
        between = [exchange(lane, steps.sends, steps.receives)] if lanes.split.has_lane else []
        return run_all([first_step, *between, combining(op, steps.totals), last])

    def _bound(self, work: _Work, group: int) -> Bound:
        copies, reductions = (np.array(rows, t) for rows, t in ((work.copies, _COPY), (work.reductions, _REDUCTION)))
        row = (group, 0, len(copies), len(reductions), _address(copies), _address(reductions), work.small)
        return SharedCollective(self._run, row, [copies, reductions, work.kept])


class SharedCollective(SelfRecording):
    """A collective that is ready to run, unrecorded when it is called itself.

    Args:
        run: The function of shared.c.
        row: A `_COLLECTIVE`.
        kept: What its addresses point to.
    """

    def __init__(self, run: Callable[[int], None], row: tuple, kept: list[Any]):
        self._run, self._row, self._kept = run, row, kept

    def __call__(self) -> None:
        self.recorded(None, Tally())()

    def recorded(self, place: Place | None, tally: Tally) -> Bound:
        record, whole = np.zeros(1, _RECORD), np.zeros(1, _COLLECTIVE)
        record[0] = (*(place or (0,) * len(Place._fields)), 0, 0.0)
        whole[0] = (self._row[0], _address(record), *self._row[2:])
        tally.native.append(lambda: (int(record["calls"][0]), float(record["seconds"][0])))
        run = functools.partial(self._run, _address(whole))
        vars(run)["kept"] = whole, record, self._kept
        return run


def _owner(x: np.ndarray) -> Any:
    """What keeps the memory of an array, and of all its views."""
    while isinstance(x, np.ndarray):
        x = x.base  # type: ignore[assignment]
    return x.obj if isinstance(x, memoryview) else x


def _mapped(file: int | str, inode: int, nbytes: int) -> mmap.mmap:
    """The memory behind a descriptor, or a path to one; what was offered, and nothing else."""
    fd = file if isinstance(file, int) else os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_ino != inode:
            raise OSError("the memory of another rank is not where it was offered")
        return mmap.mmap(fd, nbytes)
    finally:
        if isinstance(file, str):
            os.close(fd)


# ---- what each collective does between its two barriers ------------------------------------------


class _Work:
    """Copies and reductions of one rank, as the structures of shared.c."""

    def __init__(self, memory: SharedMemory, members: Sequence[int], group: Group | None):
        self.memory, self.members = memory, members
        self.group: Any = group
        self.copies: list[tuple] = []
        self.reductions: list[tuple] = []
        self.small = 0
        self.kept: list[Any] = []

    def of_all(self, x: np.ndarray, shapes: Sequence[Sequence[int]]) -> list[np.ndarray] | None:
        """What each rank of the group holds at the place of ``x``, by rank; None if ``x`` is not shared."""
        region = self.memory.region_of(x)
        if region is None:
            return None
        self.kept.append(region)
        return [region.of(rank, x, shape) for rank, shape in zip(self.members, shapes, strict=True)]

    def copy(self, to: np.ndarray, source: np.ndarray, result: int = 0) -> None:
        """Adds a copy between views of equal shape; ``to`` is part of a result of so many bytes."""
        if to.size == 0:
            return
        sizes, steps = collapse(to.shape, [to.strides, source.strides])
        sizes, steps = (1, *sizes), [(0, *s) for s in steps]
        item = to.itemsize
        if steps[0][-1] == steps[1][-1] == item:
            nbytes, sizes, steps = item * sizes[-1], sizes[:-1], [s[:-1] for s in steps]
        else:
            nbytes = item
        past_cache = 2 * result >= PAST_CACHE_BYTES and nbytes >= PAST_CACHE_RUN
        outer = max(0, len(sizes) - _LOOPS)  # what C has no loop for
        fill = _LOOPS - len(sizes) + outer
        for at in itertools.product(*map(range, sizes[:outer])):
            begins = [
                _address(x) + sum(map(operator.mul, at, step)) for x, step in zip((to, source), steps, strict=True)
            ]
            inner = [(0,) * fill + tuple(step[outer:]) for step in steps]
            self.copies.append((*begins, nbytes, past_cache, (1,) * fill + tuple(sizes[outer:]), *inner))

    def reduce(self, op: str, to: Sequence[np.ndarray], sources: Sequence[np.ndarray]) -> None:
        """Adds a reduction of [rows, columns] views, element by element, to all targets."""
        rows, columns = to[0].shape
        if not rows * columns:
            return
        dtype = sources[0].dtype.name
        if dtype == "bool":
            dtype, op = "uint8", _BOOL_OPS[op]
        begins = [np.array([_address(x) for x in xs], np.int64) for xs in (sources, to)]
        self.kept += begins
        kinds = _TYPES[dtype], OPS.index(op)
        numbers = (rows, columns, sources[0].strides[0], to[0].strides[0], *kinds, len(sources), len(to))
        past_cache = (1 + len(sources)) * to[0].nbytes >= PAST_CACHE_BYTES and _address(to[0]) not in begins[0]
        self.reductions.append((*numbers, past_cache, *map(_address, begins)))


def _all_reduce(work: _Work, c: AllReduce) -> bool:
    n, me, x = work.group.n, work.group.comm.rank, c.x
    if 0 < x.nbytes <= SLOT_BYTES:
        work.small = _address(x)
        row = x.reshape(1, -1)
        work.reduce(c.op, [row], [row])
        return True
    xs = work.of_all(x, [x.shape] * n)
    if xs is None:
        return False
    parts = starts([PART_ELEMENTS * k for k in block_sizes(-(-x.size // PART_ELEMENTS), n)])
    rows = [a.reshape(1, -1)[:, parts[me] : parts[me + 1]] for a in xs]
    work.reduce(c.op, rows, rows)
    return True


def _reduce_scatter(work: _Work, c: ReduceScatter) -> bool:
    xs = work.of_all(c.x, [c.x.shape] * work.group.n)
    if xs is None:
        return False
    rows, post = math.prod(c.x.shape[: c.axis]), math.prod(c.x.shape[c.axis + 1 :])
    begin = starts([size * post for size in c.sizes])
    first, end = begin[work.group.index], begin[work.group.index + 1]
    whole = [x.reshape(rows, begin[-1])[:, first:end] for x in xs]
    work.reduce(c.op, [c.out.reshape(rows, end - first)], whole)
    return True


def _all_gather(work: _Work, c: AllGather) -> bool:
    blocks = work.group.blocks
    xs = work.of_all(c.x, [replaced(c.x.shape, c.axis, c.sizes[b]) for b in blocks])
    begin = starts(c.sizes)
    for b, x in zip(blocks, xs or (), strict=False):
        work.copy(block(c.out, c.axis, begin[b], begin[b + 1]), x, c.out.nbytes)
    return xs is not None


def _all_to_all(work: _Work, c: AllToAll) -> bool:
    blocks, mine = work.group.blocks, work.group.index
    xs = work.of_all(c.x, [replaced(c.x.shape, c.concat_axis, c.concat_sizes[b]) for b in blocks])
    split, concat = starts(c.split_sizes), starts(c.concat_sizes)
    for b, x in zip(blocks, xs or (), strict=False):
        part = block(x, c.split_axis, split[mine], split[mine + 1])
        work.copy(block(c.out, c.concat_axis, concat[b], concat[b + 1]), part, c.out.nbytes)
    return xs is not None


def _shift(work: _Work, c: Shift) -> bool:
    e, axis, mine = c.exchange, c.axis, work.group.index
    blocks: dict[int, list[np.ndarray]] = {b: [] for b in work.group.blocks}
    for x, size in zip(c.xs, e.sizes, strict=True):
        extents = {b: block_range(size, e.blocks, b) for b in blocks}
        held = work.of_all(x, [replaced(x.shape, axis, stop - start) for start, stop in extents.values()])
        if held is None:
            return False
        for b, theirs in zip(blocks, held, strict=True):
            blocks[b].append(theirs)
    value = np.full(1, c.value, c.out.dtype)
    work.kept.append(value)
    for start, stop in unfilled_positions(e, mine):
        part = block(c.out, axis, start, stop)
        work.copy(part, np.broadcast_to(value.reshape((1,) * part.ndim), part.shape))
    for p in pieces_to(e, mine):
        work.copy(piece_target(c.out, axis, e, p), piece_source(blocks[p.source], axis, e, p), c.out.nbytes)
    return True


# ---- which ranks share memory --------------------------------------------------------------------


def opened(comm: MPI.Intracomm, host_of: Sequence[int], sets: int) -> SharedMemory | None:
    """The memory that the ranks of a mesh share on each host; None, on all, where that cannot be.  Collective.

    Args:
        comm: Of the mesh.
        host_of: The number of each rank's host.
        sets: Number of sets of its axes.
    """
    memory, library = None, None
    if os.environ.get(SHARED_VARIABLE) != "off":
        with contextlib.suppress(CompilerError):
            library = load_library(SOURCE.read_text(encoding="utf-8"))
    told = comm.allgather(None if library is None else os.sched_getaffinity(0))
    if library is None or None in told:
        return None
    here = cast(MPI.Intracomm, comm.Split(host_of[comm.rank], comm.rank))
    ranks = [r for r, host in enumerate(host_of) if host == host_of[comm.rank]]
    cores = set[int]().union(*(told[r] or () for r in ranks))
    with contextlib.suppress(OSError):
        memory = SharedMemory(here, ranks, sets, library, len(cores))
    if all(comm.allgather(memory is not None)):
        return memory
    here.Free()
    return None
