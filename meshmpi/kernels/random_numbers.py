"""Random numbers that depend on (seed, key, step, global index) only: invariant 13.

The generator is "squares" (B. Widynski, arXiv:2004.06278): four rounds of squaring and swapping halves turn a
64-bit counter (the linear index in the *global* shape, plus 2**48 times the number of the draw) and a key (from
seed, key and step by BLAKE2b) into 32 random bits.  The normal distribution is Box-Muller with a logarithm and a
sine of operations that IEEE 754 rounds alike on every machine; a library's logarithm differs between vector widths.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from meshmpi.errors import ProgramError
from meshmpi.hashes import blake2b
from meshmpi.ir.kinds import Random
from meshmpi.kernels.binding import Arrays, Call, Plan, Runtime, Scratch
from meshmpi.kernels.expressions import Space, cut
from meshmpi.kernels.steps import Bound, quiet
from meshmpi.kernels.views import BFLOAT16, collapse, numpy_dtype

DISTRIBUTIONS = ("uniform", "normal", "truncated_normal")
PIECE_ELEMENTS = 16384
"""Elements of a piece: 128 KB per 64-bit array.  Measured (uniform, ns per element): 4.9 with 4096, 3.1 with
16384, 3.4 with 65536."""
DRAW_SHIFT = 48
"""Draws of one element are 2**48 counters apart: the most elements a tensor may have."""
TRUNCATION = 2.0
"""In standard deviations, of the truncated normal distribution."""

_U64 = np.dtype(np.uint64)
_F64 = np.dtype(np.float64)
_MASK = (1 << 64) - 1
_HALF = np.array(32, _U64)
_SQRT_HALF_BITS = np.array(math.sqrt(0.5)).view(np.int64)
_MANTISSA_BITS = np.array(52, np.int64)
_LOG_2 = 0.6931471805599453


def _next_of_sine(term: float, n: int) -> float:
    return -term * (4 * math.pi * math.pi) / (2 * n * (2 * n + 1))


_SINE = tuple(itertools.accumulate(range(1, 12), _next_of_sine, initial=2 * math.pi))
"""sin(2 pi q) = q (s0 + s1 q^2 + ...): the Taylor series, exact to 1e-17 for |q| <= 1/4."""
_LOG = tuple(2.0 / (2 * n + 1) for n in range(11))
"""log((1 + f) / (1 - f)) = f (2 + 2/3 f^2 + ...), exact to 1e-17 for |f| <= 0.172."""


def stream_key(seed: int, key: str, step: int) -> int:
    """The generator's 64-bit key of one tensor at one step.

    As the paper asks, each half consists of eight different hexadecimal digits other than 0, and
    the last digit is odd.
    """
    digest = blake2b(f"{seed}|{step}|{key}".encode()).digest()
    value = 0
    for half in range(2):
        digits = list(range(1, 16))
        for k in range(8):
            choice = digest[half * 8 + k] | digest[16 + half * 8 + k] << 8
            pool = [d for d in digits if d % 2] if k == 0 else digits
            digit = pool[choice % len(pool)]
            digits.remove(digit)
            value |= digit << (32 * half + 4 * k)
    return value


@functools.lru_cache(maxsize=64)
def _pattern(sizes: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """Counters of the elements of a piece relative to its first, in C order."""
    out = np.zeros(1, _U64)
    for n, stride in zip(sizes, strides, strict=True):
        out = np.add.outer(out, np.arange(n, dtype=_U64) * np.uint64(stride)).reshape(-1)
    out.flags.writeable = False
    return out


class Counters:
    """The counters of the elements of a block of a tensor, piece by piece.

    Args:
        block: (start, stop) along each dim.
    """

    def __init__(self, sizes: Sequence[int], block: Sequence[tuple[int, int]]):
        strides = [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]
        self.base = sum(start * s for (start, _), s in zip(block, strides, strict=True))
        local = [stop - start for start, stop in block]
        self.elements = math.prod(local)
        self.space = Space((1,), 0, 1)
        self.strides: tuple[int, ...] = (1,)
        if self.elements > 1:
            merged, (self.strides,) = collapse(local, [strides])
            self.space = cut(merged, PIECE_ELEMENTS)
        inner = (self.space.chunk, *self.space.sizes[self.space.axis + 1 :])
        self.piece_elements = math.prod(inner)
        self.pattern = _pattern(inner, self.strides[self.space.axis :])

    def pieces(self) -> Iterator[tuple[int, int]]:
        """(first counter, elements) of each piece; pieces follow each other in C order."""
        axis = self.space.axis
        per_index = self.piece_elements // self.space.chunk
        for index, start, stop in self.space.pieces():
            leading = sum(i * s for i, s in zip(index, self.strides, strict=False))
            yield self.base + leading + start * self.strides[axis], (stop - start) * per_index


def _reserve(n: int) -> Scratch:
    """Room for the intermediate values of a piece: five of 64 bits, three float64, one float32."""
    scratch = Scratch()
    for dtype in (*[_U64] * 5, *[_F64] * 3, np.dtype(np.float32)):
        scratch.reserve((n,), dtype)
    return scratch


class Generator:
    """Fills flat arrays from counters, in a workspace."""

    def __init__(self, distribution: str, dtype: np.dtype, counters: Counters, scratch: Scratch, workspace: np.ndarray):
        self.distribution, self.dtype, self.counters = distribution, dtype, counters
        arrays = [slot.array(workspace) for slot in scratch.slots]
        (self.scaled, self.x, self.y, self.z, self.t), self.w, self.narrow = arrays[:5], arrays[5:8], arrays[8]
        self.key = 0

    def fill(self, out: np.ndarray, key: int) -> None:
        """Writes the numbers of all counters to the flat array ``out``."""
        self.key = key
        np.multiply(self.counters.pattern, np.array(key, _U64), out=self.scaled)
        write = self._uniform if self.distribution == "uniform" else self._normal
        position = 0
        for first, n in self.counters.pieces():
            write(first, n, out[position : position + n])
            position += n

    def bits(self, scaled: np.ndarray, first: int, draw: int) -> np.ndarray:
        """32 random bits (as uint64, in ``self.x``) for the counters ``scaled / key + first``."""
        n = len(scaled)
        x, y, z, t = self.x[:n], self.y[:n], self.z[:n], self.t[:n]
        offset = ((first + (draw << DRAW_SHIFT)) * self.key) & _MASK
        np.add(scaled, np.array(offset, _U64), out=y)
        np.add(y, np.array(self.key, _U64), out=z)
        source = y
        for term in (y, z, y):
            np.multiply(source, source, out=x)
            np.add(x, term, out=x)
            np.right_shift(x, _HALF, out=t)
            np.left_shift(x, _HALF, out=x)
            np.bitwise_or(x, t, out=x)
            source = x
        np.multiply(x, x, out=x)
        np.add(x, z, out=x)
        return np.right_shift(x, _HALF, out=x)

    def _fraction(self, scaled: np.ndarray, first: int, draw: int, out: np.ndarray) -> float:
        """Random whole numbers below 1 / unit into the float64 array ``out``; returns the unit."""
        wide = self.dtype == np.float64
        x = self.bits(scaled, first, draw)
        if not wide:
            np.copyto(out, x.view(np.int64), casting="unsafe")
            return 2.0**-32
        np.right_shift(x, np.array(5, _U64), out=x)
        np.copyto(out, x.view(np.int64), casting="unsafe")
        np.multiply(out, 2.0**26, out=out)
        x = self.bits(scaled, first, draw + 2)
        np.right_shift(x, np.array(6, _U64), out=x)
        low = self.t[: len(x)].view(np.float64)
        np.copyto(low, x.view(np.int64), casting="unsafe")
        np.add(out, low, out=out)
        return 2.0**-53

    def _uniform(self, first: int, n: int, out: np.ndarray) -> None:
        """24 (float32), 53 (float64) random bits; bfloat16 is cut, not rounded, to stay below 1."""
        scaled = self.scaled[:n]
        if self.dtype == np.float64:
            unit = self._fraction(scaled, first, 0, out)
            np.multiply(out, unit, out=out)
            return
        x = self.bits(scaled, first, 0)
        np.right_shift(x, np.array(8, _U64), out=x)
        values = out if self.dtype == np.float32 else self.narrow[:n]
        np.copyto(values, x.view(np.int64), casting="unsafe")
        np.multiply(values, np.float32(2.0**-24), out=values)
        if self.dtype == BFLOAT16:
            shifted = self.t.view(np.uint32)[:n]
            np.right_shift(values.view(np.uint32), np.array(16, np.uint32), out=shifted)
            np.copyto(out.view(np.uint16), shifted, casting="unsafe")

    def _normal(self, first: int, n: int, out: np.ndarray) -> None:
        z = self._box_muller(self.scaled[:n], first, 0)
        if self.distribution == "truncated_normal":
            self._redraw(z, first)
        if self.dtype == BFLOAT16:
            np.copyto(self.narrow[:n], z, casting="unsafe")
            z = self.narrow[:n]
        np.copyto(out, z, casting="unsafe")

    def _redraw(self, z: np.ndarray, first: int) -> None:
        """Replaces what lies outside the truncation by further draws of the same elements."""
        result = z.copy()
        outside = np.flatnonzero(np.abs(result) > TRUNCATION)
        draw = 4
        while len(outside):
            again = self._box_muller(self.scaled[outside], first, draw)
            result[outside] = again
            outside = outside[np.abs(again) > TRUNCATION]
            draw += 4
        z[...] = result

    def _box_muller(self, scaled: np.ndarray, first: int, draw: int) -> np.ndarray:
        """sqrt(-2 log u) cos(2 pi v) in float64, u in (0, 1] and v in [0, 1) from two draws."""
        n = len(scaled)
        u, v, s = (w[:n] for w in self.w)
        unit = self._fraction(scaled, first, draw, u)
        np.add(u, 1.0, out=u)
        np.multiply(u, unit, out=u)
        self._log(u, v, s)
        np.multiply(u, -2.0, out=u)
        np.sqrt(u, out=u)
        unit = self._fraction(scaled, first, draw + 1, v)
        np.multiply(v, unit, out=v)
        np.subtract(v, 0.5, out=v)
        np.absolute(v, out=v)
        np.subtract(v, 0.25, out=v)  # cos(2 pi v) = sin(2 pi (|v - 1/2| - 1/4))
        np.multiply(v, v, out=s)
        np.multiply(u, v, out=u)
        np.multiply(u, _polynomial(_SINE, s, v), out=u)
        return u

    def _log(self, u: np.ndarray, f: np.ndarray, s: np.ndarray) -> None:
        """u = log(u) for normal u > 0, through u = 2^e m with sqrt(1/2) <= m < sqrt 2."""
        n = len(u)
        bits, e = u.view(np.int64), self.x[:n].view(np.int64)
        np.subtract(bits, _SQRT_HALF_BITS, out=e)
        np.right_shift(e, _MANTISSA_BITS, out=e)
        shifted = self.t[:n].view(np.int64)
        np.left_shift(e, _MANTISSA_BITS, out=shifted)
        np.subtract(bits, shifted, out=bits)
        np.subtract(u, 1.0, out=f)
        np.add(u, 1.0, out=u)
        np.divide(f, u, out=f)
        np.multiply(f, f, out=s)
        np.multiply(f, _polynomial(_LOG, s, self.y[:n].view(np.float64)), out=f)
        np.copyto(u, e, casting="unsafe")
        np.multiply(u, _LOG_2, out=u)
        np.add(u, f, out=u)


def _polynomial(coefficients: Sequence[float], z: np.ndarray, out: np.ndarray) -> np.ndarray:
    """c0 + c1 z + ... into ``out``, by Horner's rule."""
    np.multiply(z, coefficients[-1], out=out)
    for c in coefficients[-2:0:-1]:
        np.add(out, c, out=out)
        np.multiply(out, z, out=out)
    return np.add(out, coefficients[0], out=out)


def random_block(
    distribution: str,
    seed: int,
    key: str,
    step: int,
    shape: Sequence,
    block: Sequence[tuple[int, int]],
    dtype: str = "float32",
) -> np.ndarray:
    """One block of a tensor of random numbers, the same numbers in whatever blocks it is asked for.

    Args:
        distribution: ``"uniform"`` in [0, 1), ``"normal"``, or ``"truncated_normal"`` (normal,
            drawn again until it is within two standard deviations).
        seed, key, step: Which stream: the seed of the program, a name, the number of the step.
        shape: The global shape, a Shape or a sequence of sizes.
        block: (start, stop) along each dim.
        dtype: ``"float32"``, ``"float64"`` or ``"bfloat16"``; all three come from the same bits.
    """
    sizes = tuple(getattr(shape, "sizes", shape))
    counters = Counters(sizes, block)
    out = np.empty([stop - start for start, stop in block], numpy_dtype(dtype))
    _check_distribution(distribution)
    if out.size:
        scratch = _reserve(counters.piece_elements)
        generator = Generator(distribution, out.dtype, counters, scratch, np.empty(scratch.bytes, np.uint8))
        generator.fill(out.reshape(-1), stream_key(seed, key, step))
    return out


def _check_distribution(name: str) -> None:
    if name not in DISTRIBUTIONS:
        raise ProgramError(f"random: there is no distribution '{name}'.", f"Use one of {', '.join(DISTRIBUTIONS)}.")


def plan_random(call: Call) -> Plan:
    """Fills the block at the running step with the numbers of its key."""
    attrs, y, seed = call.of(Random), call.outputs[0], call.program.seed
    _check_distribution(attrs.distribution)
    counters = Counters(y.type.shape.sizes, y.block)
    scratch = _reserve(counters.piece_elements if y.elements else 0)

    def bind(inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        flat = outputs[0].reshape(-1)
        generator = Generator(attrs.distribution, flat.dtype, counters, scratch, workspace)
        return quiet(lambda: generator.fill(flat, stream_key(seed, attrs.key, runtime.step)))

    return Plan(bind, scratch.bytes)
