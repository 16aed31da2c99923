"""The loops in eager PyTorch, by its own fused functions where it has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from apps.bench.loops.data import ADAM_EPSILON, BETA1, BETA2, EPSILON, RATE, Data, Loops, operands

aten = torch.ops.aten


def loops(d: Data) -> Loops:
    """See `apps.bench.loops.data`."""
    torch.set_num_threads(1)
    t = {name: torch.from_numpy(x) for name, x in vars(d).items() if isinstance(x, np.ndarray)}
    scores, p, dp, x, dy, scale = (t[n] for n in ("scores", "weights", "d_weights", "x", "dy", "scale"))
    mean, inverse, width = t["mean"][:, None], t["inverse"][:, None], [d.x.shape[1]]
    shift, h, bias, y, dh = (t[n] for n in ("shift", "h", "bias", "y", "dh"))
    calls: dict[str, Callable[[], Any]] = {
        "softmax forward": lambda: [torch.softmax(scores, 1)],
        "softmax backward": lambda: [aten._softmax_backward_data(dp, p, 1, torch.float32)],
        "cross-entropy both": _cross_entropy(t["logits"], t["targets"].long()),
        "layer norm forward": lambda: aten.native_layer_norm(x, width, scale, shift, EPSILON)[:1],
        "layer norm backward": lambda: aten.native_layer_norm_backward(
            dy, x, width, mean, inverse, scale, shift, [True] * 3
        ),
        "bias + relu forward": lambda: [torch.add(h, bias).relu_()],
        "bias + relu backward": lambda: _with_sum(aten.threshold_backward(dh, y, 0)),
    }
    return {**{name: _plain(call) for name, call in calls.items()}, "Adam": _adam(d)}


def _with_sum(dx: torch.Tensor) -> list[torch.Tensor]:
    return [dx, dx.sum(0)]


def _plain(call: Callable[[], Any]) -> Callable[[], list]:
    def run() -> list:
        with torch.inference_mode():
            return [x.numpy() for x in call()]

    return run


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> Callable[[], list]:
    """By the two functions that F.cross_entropy and its gradient consist of."""
    mean, ignored, one = 1, -100, torch.ones(())

    def run() -> list:
        logs = torch.log_softmax(logits, 1)
        loss, weight = aten.nll_loss_forward(logs, targets, None, mean, ignored)
        d = aten.nll_loss_backward(one, logs, targets, None, mean, ignored, weight)
        return [loss, aten._log_softmax_backward_data(d, logs, 1, torch.float32)]

    return run


def _adam(d: Data) -> Callable[[], None]:
    w = torch.nn.Parameter(torch.from_numpy(d.w.copy()))
    w.grad = torch.from_numpy(d.g)
    made = torch.optim.Adam([w], lr=RATE, betas=(BETA1, BETA2), eps=ADAM_EPSILON, fused=True)

    def run() -> None:
        made.step()

    return run


def product(count: int, m: int, k: int, n: int) -> Callable[[], Any]:
    """torch.bmm into a given tensor."""
    a, b = (torch.from_numpy(x) for x in operands(count, m, k, n))
    y = torch.empty((count, m, n))
    if count == 1:
        return lambda: torch.mm(a[0], b[0], out=y[0])
    return lambda: torch.bmm(a, b, out=y)


def attention(arrays: list[np.ndarray]) -> Callable[[], list]:
    """PyTorch's fused causal attention and its gradients."""
    torch.set_num_threads(1)
    *inputs, dy = (torch.from_numpy(x) for x in arrays)
    q, k, v = (x.requires_grad_() for x in inputs)

    def run() -> list:
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return [y.detach(), *torch.autograd.grad(y, [q, k, v], dy)]

    return run
