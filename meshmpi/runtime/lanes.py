"""How ranks of several hosts divide a collective, so that what crosses the network crosses it once per host.

Rank k of each host is of lane k, as far as all hosts have one; further ranks are served by the lanes in turns. Only
ranks of one lane send messages to each other, straight from and into the arrays, also those of the ranks they serve:
the ranks of a host map each other's memory. `divided` makes the steps of one rank from views of arrays; it knows
neither MPI nor which host is where.

An all_to_all stays MPI's: lanes send the same bytes, only in fewer messages, and no gain was measured.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from meshmpi.kernels.steps import Bound, nothing, run_all
from meshmpi.kernels.views import collapse
from meshmpi.runtime.operands import AllGather, ReduceScatter, block, replaced, scratch, starts

Blocks = Mapping[int, np.ndarray]
Divisible = AllGather | ReduceScatter

_COMBINE = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
_COMBINE_BOOL = {"sum": np.maximum, "max": np.maximum, "min": np.minimum, "prod": np.minimum}


@dataclass
class Steps:
    """What one rank does, in this order; views of arrays.

    Attributes:
        sums: (result, operands in the order of ranks): reductions inside the host, before messages.
        sends: For each host, what this rank sends to the rank of its lane there.
        receives: For each host, where it puts what comes from there, in the order in which that is sent.
        totals: (result, operands in the order of hosts): reductions of what has arrived.
        copies: (to, source): inside the host, after messages.
    """

    sends: list[list[np.ndarray]]
    receives: list[list[np.ndarray]]
    sums: list[tuple[np.ndarray, list[np.ndarray]]] = field(default_factory=list)
    totals: list[tuple[np.ndarray, list[np.ndarray]]] = field(default_factory=list)
    copies: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)


class Split:
    """The blocks of a group by hosts, seen by the rank that holds one of them.

    Args:
        hosts: The blocks on each host, in the order of ranks; hosts in any order that is the same on all ranks.
        mine: The own block.
    """

    def __init__(self, hosts: Sequence[Sequence[int]], mine: int):
        self.hosts, self.mine = hosts, mine
        self.here = next(h for h, blocks in enumerate(hosts) if mine in blocks)
        self.count = min(map(len, hosts))
        self.place = self.blocks.index(mine)
        self.has_lane = self.place < self.count
        self.even = self.count == max(map(len, hosts))
        self.others = [h for h in range(len(hosts)) if h != self.here]

    @property
    def blocks(self) -> Sequence[int]:
        """Those on this host."""
        return self.hosts[self.here]

    def served(self, host: int) -> Sequence[int]:
        """The blocks of a host that the own lane serves."""
        return self.hosts[host][self.place :: self.count] if self.has_lane else ()

    def server(self, host: int, number: int) -> int:
        """The block of this host whose rank serves block ``number``, which lies on another host."""
        return self.blocks[self.hosts[host].index(number) % self.count]


class Lanes(NamedTuple):
    """How the ranks of a group on several hosts divide a collective.

    Attributes:
        here: Ranks of the group on this host, ascending.
        split: The group by hosts.
        op: The reduction.
    """

    here: tuple[int, ...]
    split: Split
    op: str = "sum"


def lanes_of(members: Sequence[int], blocks: Sequence[int], host_of: Sequence[int], rank: int) -> Lanes | None:
    """How a group divides a collective; None where each of its ranks is alone on its host.

    Args:
        members: Its ranks, ascending.
        blocks: The number of the block of each.
        host_of: The host of each rank of the mesh.
        rank: The own one.
    """
    hosts = dict[int, list[int]]()
    for r, number in zip(members, blocks, strict=True):
        hosts.setdefault(host_of[r], []).append(number)
    if max(map(len, hosts.values())) == 1:
        return None
    here = tuple(r for r in members if host_of[r] == host_of[rank])
    return Lanes(here, Split(list(hosts.values()), blocks[members.index(rank)]))


def divided(call: Divisible, split: Split, xs: Blocks, outs: Blocks) -> Steps:
    """The steps of one rank.

    Args:
        call: What this rank hands in.
        split: The group by hosts.
        xs: Block of this host -> what its rank hands in.
        outs: Block of this host -> its result.
    """
    steps = Steps([[] for _ in split.hosts], [[] for _ in split.hosts])
    _DIVIDE[type(call)](steps, call, split, xs, outs)
    return steps


def _all_gather(steps: Steps, c: AllGather, split: Split, xs: Blocks, outs: Blocks) -> None:
    """Between equal ranks of the hosts; then each takes what its neighbours got."""
    begin = starts(c.sizes)

    def part(holder: int, b: int) -> np.ndarray:
        return block(outs[holder], c.axis, begin[b], begin[b + 1])

    for host in split.others:
        if split.has_lane:
            steps.sends[host] = [xs[b] for b in split.served(split.here)]
            steps.receives[host] = [part(split.mine, b) for b in split.served(host)]
        servers = {b: split.server(host, b) for b in split.hosts[host]}
        steps.copies += [(part(split.mine, b), part(s, b)) for b, s in servers.items() if s != split.mine]
    steps.copies += [(part(split.mine, b), xs[b]) for b in split.blocks]


def _reduce_scatter(steps: Steps, c: ReduceScatter, split: Split, xs: Blocks, outs: Blocks) -> None:
    """Inside the host, what the own lane serves on all hosts; the sums of all hosts are added in their order."""
    begin, rows = starts(c.sizes), int(np.prod(c.x.shape[: c.axis]))
    post = int(np.prod(c.x.shape[c.axis + 1 :]))
    # Served blocks, of this host's sum for each host and of each host's sum for this one.
    wanted = [(h, b) for h in range(len(split.hosts)) for b in split.served(h)]
    arriving = [(h, b) for h in split.others for b in split.served(split.here)]
    sizes = [rows * post * c.sizes[b] for _, b in (*wanted, *arriving)]
    parts = np.split(scratch(c.workspace, sum(sizes), c.x.dtype), starts(sizes)[1:-1]) if sizes else []
    shaped = [p.reshape(rows, post * c.sizes[b]) for p, (_, b) in zip(parts, (*wanted, *arriving), strict=True)]
    own = dict(zip(wanted, shaped[: len(wanted)], strict=True))
    theirs = dict(zip(arriving, shaped[len(wanted) :], strict=True))
    for (_, b), to in own.items():
        whole = [xs[k].reshape(rows, post * begin[-1])[:, post * begin[b] : post * begin[b + 1]] for k in split.blocks]
        steps.sums.append((to, whole))
    for host in split.others:
        steps.sends[host] = [own[host, b] for b in split.served(host)]
        steps.receives[host] = [theirs[host, b] for b in split.served(split.here)]
    for b in split.served(split.here):
        of_hosts = [own[h, b] if h == split.here else theirs[h, b] for h in range(len(split.hosts))]
        steps.totals.append((outs[b].reshape(of_hosts[0].shape), of_hosts))


_DIVIDE: Mapping[type, Callable[..., None]] = {AllGather: _all_gather, ReduceScatter: _reduce_scatter}


def block_shapes(c: Divisible, b: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of what the rank with block ``b`` hands in, and of its result."""
    block_of = c.x if isinstance(c, AllGather) else c.out
    mine = replaced(block_of.shape, c.axis, c.sizes[b])
    return (mine, c.out.shape) if isinstance(c, AllGather) else (c.x.shape, mine)


def reduction_bytes(c: ReduceScatter, split: Split) -> int:
    """Scratch memory of a reduce_scatter on this rank."""
    served = [c.sizes[b] for h in range(len(split.hosts)) for b in split.served(h)]
    served += [c.sizes[b] for _ in split.others for b in split.served(split.here)]
    return sum(served) * (c.x.nbytes // max(1, sum(c.sizes)))


def exchange(lane: MPI.Comm, sends: Sequence[Sequence[np.ndarray]], receives: Sequence[Sequence[np.ndarray]]) -> Bound:
    """One message to and from each rank of a lane, without copies of ours.

    Args:
        lane: Has one rank on each host.
        sends: For each rank, views that it gets.
        receives: For each rank, where what it sends is put; as many bytes.
    """
    if not any(x.size for views in (*sends, *receives) for x in views):
        sends = receives = [[] for _ in sends]
    out, into = _message(sends), _message(receives)
    run = functools.partial(lane.Alltoallw, out, into)
    vars(run)["kept"] = sends, receives
    weakref.finalize(run, _free, (*out[3], *into[3])).atexit = False
    return run


def _message(views: Sequence[Sequence[np.ndarray]]) -> list:
    """Views of several arrays, as MPI takes them at their addresses."""
    types = [_type([x for x in one if x.size]) for one in views]
    return [MPI.BOTTOM, [int(any(x.size for x in one)) for one in views], [0] * len(views), types]


def _type(views: Sequence[np.ndarray]) -> MPI.Datatype:
    """The bytes of some views, one after another."""
    found = [_strided(x) for x in views]
    begins = [x.__array_interface__["data"][0] for x in views]
    whole = MPI.Datatype.Create_struct([1] * len(found), begins, found).Commit()
    _free(found)
    return whole


def _strided(x: np.ndarray) -> MPI.Datatype:
    sizes, (steps,) = collapse(x.shape, [x.strides])
    sizes, steps = (*sizes, x.itemsize), (*steps, 1)
    if len(steps) > 1 and steps[-2] == x.itemsize:
        sizes, steps = (*sizes[:-2], sizes[-2] * x.itemsize), (*steps[:-2], 1)
    found = MPI.BYTE.Create_contiguous(sizes[-1])
    for n, step in zip(reversed(sizes[:-1]), reversed(steps[:-1]), strict=True):
        inner, found = found, found.Create_hvector(n, 1, step)
        inner.Free()
    return found


def _free(types: Sequence[MPI.Datatype]) -> None:
    if not MPI.Is_finalized():
        for one in types:
            one.Free()


def combining(op: str, totals: Sequence[tuple[np.ndarray, list[np.ndarray]]]) -> Bound:
    """The reductions of what came from all hosts, in the order of hosts."""
    steps: list[Bound] = []
    for to, (first, second, *more) in totals:
        combine = (_COMBINE_BOOL if to.dtype == np.bool_ else _COMBINE)[op]
        steps.append(functools.partial(combine, first, second, to))
        steps += [functools.partial(combine, to, x, to) for x in more]
    return run_all(steps) if steps else nothing
