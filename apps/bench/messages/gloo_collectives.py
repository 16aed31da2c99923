"""Worker of the peers' environment: the same collectives through gloo, by torch.distributed."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from apps.bench.messages.timing import KINDS, RANKS, SIZES, interleaved, options_of_worker
from apps.bench.step.yardstick import emit


def call(kind: str, n: int) -> Callable[[], object]:
    """One collective of ``n`` bytes on tensors of its own."""
    x, y, block = torch.zeros(n // 4), torch.zeros(n // 4), torch.zeros(n // 4 // RANKS)
    return {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_gather": lambda: dist.all_gather_into_tensor(x, block),
        "all_to_all": lambda: dist.all_to_all_single(y, x),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(block, x),
    }[kind]


def slowest(times: list[float]) -> list[float]:
    """The greatest time of all ranks, one by one."""
    most = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.tolist()


def main() -> None:
    """Prints this rank's result."""
    options = options_of_worker()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, dict[int, float]] = {kind: {} for kind in KINDS}
    for kind in KINDS:
        for n in SIZES:
            if n <= options.most:
                ways = {"gloo": call(kind, n)}
                found[kind][n] = interleaved(ways, dist.barrier, slowest, options.seconds)["gloo"]
    emit(rank=dist.get_rank(), microseconds=found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
