"""Worker of the peers' environment: the yardstick step in PyTorch (eager, its fused attention).

One process of several threads, or data-parallel (DistributedDataParallel) or tensor-parallel
(parallelize_module) over processes that gloo connects.  Adam is PyTorch's fused one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from apps.bench.step import yardstick as ys
from apps.bench.step.yardstick import Sizes, Start


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm, each added to what came in."""

    def __init__(self, s: Sizes):
        super().__init__()
        wide = s.heads * s.d_kv
        self.d_kv = s.d_kv
        self.attention_norm = nn.LayerNorm(s.d_model, ys.NORM_EPSILON)
        self.q, self.k, self.v = (nn.Linear(s.d_model, wide, bias=False) for _ in range(3))
        self.o = nn.Linear(wide, s.d_model, bias=False)
        self.feed_forward_norm = nn.LayerNorm(s.d_model, ys.NORM_EPSILON)
        self.wi, self.wo = nn.Linear(s.d_model, s.d_ff), nn.Linear(s.d_ff, s.d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, length, d_model] -> the same shape."""
        h = self.attention_norm(x)
        split = [project(h).unflatten(2, (-1, self.d_kv)).transpose(1, 2) for project in (self.q, self.k, self.v)]
        seen = F.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        return x + self.wo(F.relu(self.wi(self.feed_forward_norm(x))))


class Decoder(nn.Module):
    """Tokens [batch, length] -> logits [batch, length, vocab]."""

    def __init__(self, s: Sizes):
        super().__init__()
        self.embedding = nn.Embedding(s.vocab, s.d_model)
        self.positions = nn.Parameter(torch.empty(s.length, s.d_model))
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.final_norm = nn.LayerNorm(s.d_model, ys.NORM_EPSILON)
        self.softmax = nn.Linear(s.d_model, s.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.softmax(self.final_norm(x))


def parameters_by_name(model: Decoder) -> dict[str, tuple[nn.Parameter, int]]:
    """Name in the file of first values -> parameter, and how many of the file's dims its matrix
    has as rows; 0 where it is laid out as in the file.  nn.Linear keeps [out, in].
    """
    found: dict[str, tuple[Any, int]] = {
        "embedding": (model.embedding.weight, 0),
        "positions": (model.positions, 0),
        "final_norm/scale": (model.final_norm.weight, 0),
        "final_norm/bias": (model.final_norm.bias, 0),
        "softmax": (model.softmax.weight, 1),
    }
    for k, layer in enumerate(model.layers):
        at = f"layer_{k:03d}"
        for name in ("attention_norm", "feed_forward_norm"):
            norm = getattr(layer, name)
            found[f"{at}/{name}/scale"] = (norm.weight, 0)
            found[f"{at}/{name}/bias"] = (norm.bias, 0)
        for name, rows in (("q", 1), ("k", 1), ("v", 1), ("o", 2)):
            found[f"{at}/attention/{name}"] = (getattr(layer, name).weight, rows)
        for name in ("wi", "wo"):
            dense = getattr(layer, name)
            found[f"{at}/feed_forward/{name}/kernel"] = (dense.weight, 1)
            found[f"{at}/feed_forward/{name}/bias"] = (dense.bias, 0)
    return found


@torch.no_grad()
def take_first_values(model: Decoder, start: Start) -> None:
    """Fills the parameters from the file, each exactly once."""
    places = parameters_by_name(model)
    if sorted(places) != sorted(start.names) or len(places) != len(list(model.parameters())):
        raise SystemExit("the file of first values does not fit the PyTorch model")
    for name, (parameter, rows) in places.items():
        value = torch.from_numpy(start[name])
        if rows:
            value = value.flatten(0, rows - 1).flatten(1).T
        parameter.copy_(value)


def tensor_parallel(model: Decoder, processes: int) -> nn.Module:
    """Heads, d_ff and vocab split over the processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "softmax": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for k in range(len(model.layers)):
        plan |= {f"layers.{k}.{name}": ColwiseParallel() for name in ("q", "k", "v", "wi")}
        plan |= {f"layers.{k}.{name}": RowwiseParallel() for name in ("o", "wo")}
    return parallelize_module(model, init_device_mesh("cpu", (processes,)), plan)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Split and whole parameters in groups of their own: the fused kernel takes one kind."""
    from torch.distributed.tensor import DTensor

    kinds = [[], []]
    for parameter in model.parameters():
        kinds[isinstance(parameter, DTensor)].append(parameter)
    return torch.optim.Adam(
        [{"params": kind} for kind in kinds if kind], lr=ys.RATE, betas=(ys.BETA1, ys.BETA2), eps=ys.EPSILON, fused=True
    )


def stepper(model: nn.Module, mode: str, start: Start, bf16: bool) -> Callable[[int], float]:
    """Step number -> mean loss over all processes."""
    optimizer = adam(model)
    rows = slice(None)
    if mode == "ddp":
        n = start.sizes.batch // dist.get_world_size()
        rows = slice(dist.get_rank() * n, (dist.get_rank() + 1) * n)
    context: Any = contextlib.nullcontext
    if mode == "tp":
        from torch.distributed.tensor.parallel import loss_parallel as context

    def step(number: int) -> float:
        x, y = (torch.from_numpy(a[rows]).long() for a in start.batch(number))
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(x)
        with context():
            loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
            loss.backward()
        optimizer.step()
        if mode == "ddp":
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            return mean.item()
        return (loss.full_tensor() if mode == "tp" else loss).item()

    return step


def main() -> None:
    """Runs the steps and prints this process's result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("single", "ddp", "tp"))
    parser.add_argument("--start", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rank = int(os.environ.get("RANK", "0"))
    if options.mode != "single":
        ys.pin(rank)
        dist.init_process_group("gloo")
    start = Start(options.start)
    model: Any = Decoder(start.sizes)
    take_first_values(model, start)
    if options.mode == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif options.mode == "tp":
        model = tensor_parallel(model, dist.get_world_size())
    found = ys.timed_steps(stepper(model, options.mode, start, options.bf16), options.steps)
    ys.emit(rank=rank, version=f"torch {torch.__version__}", **found)
    if options.mode != "single":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
