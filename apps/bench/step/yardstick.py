"""The yardstick model as every system sees it: sizes, first values, tokens, timing of steps.

A pre-norm decoder: layer norm with scale and bias, attention without biases, ReLU feed-forward with
biases, learned positions, untied softmax, mean cross-entropy, Adam.  Needs only NumPy, because the
workers of other systems run where meshmpi is not installed.  The names of variables are those of
meshmpi without the prefix ``decoder/``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

RATE, BETA1, BETA2, EPSILON = 1e-3, 0.9, 0.999, 1e-8
NORM_EPSILON = 1e-5
STDDEV = 0.02
BATCHES = 8
"""Different batches of tokens; the steps go through them again and again."""
CHECKED, WARM = 5, 1
"""First steps, whose losses are compared between systems, and untimed steps after them."""


class Sizes(NamedTuple):
    """Sizes of a yardstick model; the defaults are the yardstick."""

    vocab: int = 8192
    length: int = 256
    d_model: int = 512
    d_ff: int = 2048
    heads: int = 8
    d_kv: int = 64
    layers: int = 4
    batch: int = 8

    def overrides(self) -> list[str]:
        """The sizes as settings of a training configuration."""
        model = self._asdict()
        batch = model.pop("batch")
        return [*(f"model.{name}={n}" for name, n in model.items()), f"train.batch={batch}"]


TOY = Sizes(vocab=64, length=16, d_model=32, d_ff=48, heads=2, d_kv=8, layers=2, batch=4)
"""For tests."""


def shapes(s: Sizes) -> Iterator[tuple[str, tuple[int, ...], float | None]]:
    """(name, shape, constant first value or None for normal numbers) of all variables."""
    yield "embedding", (s.vocab, s.d_model), None
    yield "positions", (s.length, s.d_model), None
    for k in range(s.layers):
        at = f"layer_{k:03d}"
        yield from _norm(f"{at}/attention_norm", s)
        for name in "qkv":
            yield f"{at}/attention/{name}", (s.d_model, s.heads, s.d_kv), None
        yield f"{at}/attention/o", (s.heads, s.d_kv, s.d_model), None
        yield from _norm(f"{at}/feed_forward_norm", s)
        yield f"{at}/feed_forward/wi/kernel", (s.d_model, s.d_ff), None
        yield f"{at}/feed_forward/wi/bias", (s.d_ff,), 0.0
        yield f"{at}/feed_forward/wo/kernel", (s.d_ff, s.d_model), None
        yield f"{at}/feed_forward/wo/bias", (s.d_model,), 0.0
    yield from _norm("final_norm", s)
    yield "softmax", (s.d_model, s.vocab), None


def _norm(name: str, s: Sizes) -> Iterator[tuple[str, tuple[int, ...], float]]:
    yield f"{name}/scale", (s.d_model,), 1.0
    yield f"{name}/bias", (s.d_model,), 0.0


def write_start(path: Path, sizes: Sizes) -> None:
    """Writes first values, tokens and sizes to one .npz file, the same in every run."""
    random = np.random.default_rng(20)
    arrays: dict[str, np.ndarray] = {"sizes": np.array(sizes)}
    for name, shape, constant in shapes(sizes):
        if constant is None:
            arrays[name] = random.standard_normal(shape, np.float32) * np.float32(STDDEV)
        else:
            arrays[name] = np.full(shape, constant, np.float32)
    drawn = random.integers(0, sizes.vocab, (BATCHES, sizes.batch, sizes.length + 1))
    arrays["tokens"] = drawn.astype(np.int32)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, allow_pickle=False, **arrays)


class Start:
    """What `write_start` wrote.  A variable is read when asked for, so that none is kept twice.

    Attributes:
        tokens: int32 [batches, batch, length + 1].
    """

    def __init__(self, path: str | Path):
        self._file = np.load(path)
        self.sizes = Sizes(*self._file["sizes"].tolist())
        self.tokens: np.ndarray = self._file["tokens"]
        self.names = [name for name in self._file.files if name not in ("sizes", "tokens")]

    def __getitem__(self, name: str) -> np.ndarray:
        return self._file[name]

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and targets of a step, each [batch, length]."""
        drawn = self.tokens[step % BATCHES]
        return np.ascontiguousarray(drawn[:, :-1]), np.ascontiguousarray(drawn[:, 1:])


def timed_steps(step: Callable[[int], Any], timed: int) -> dict[str, list[float]]:
    """Runs ``step(number)``, which returns the loss, and times all but the first few calls.

    Returns:
        "losses" of the first `CHECKED` steps and "seconds" of each timed one.
    """
    losses, seconds = [], []
    for k in range(CHECKED + WARM + timed):
        start = time.perf_counter()
        loss = float(step(k))
        if k < CHECKED:
            losses.append(loss)
        elif k >= CHECKED + WARM:
            seconds.append(time.perf_counter() - start)
    return {"losses": losses, "seconds": seconds}


def peak_bytes() -> int:
    """The most memory that this process held so far, in bytes.

    From /proc where there is one: getrusage also counts what the parent held before exec.
    """
    try:
        status = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next(int(x.split()[1]) * 1024 for x in status if x.startswith("VmHWM"))


def seconds_since_start() -> float:
    """Seconds since this process was started (Linux), to a hundredth."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def emit(**values: Any) -> None:
    """Prints one line that the bench reads, in one piece: ranks share their output."""
    line = "RESULT " + json.dumps({**values, "peak_bytes": peak_bytes()}) + "\n"
    os.write(1, line.encode())


def pin(core: int) -> None:
    """Binds this process to one core, counted over those that it may use."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[core % len(cores)]})
