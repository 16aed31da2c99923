"""The error function from additions, multiplications, divisions and one exponential.

NumPy has none.  With x the absolute value of the argument:
x < 1: erf(x) = x q(x^2), q a polynomial; x >= 1: erf(x) = 1 - exp(-x^2) r(u), with r a polynomial
in u = scale / (x + shift) + offset, which runs over [-1, 1].  The coefficients are Chebyshev
interpolants of erf(sqrt z)/sqrt z and of exp(x^2) erfc(x), computed with 50 digits; the largest
relative errors measured are 2.4e-16 (float64) and 1.6e-7 (float32).  Nothing here knows arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Union

import numpy as np

Argument = Union[int, np.ndarray]
"""Number of a value of the code being made, or a literal as an array without dimensions."""


class Code(Protocol):
    """What takes operations on arrays, one after the other; each returns the number of its value."""

    def emit(self, function: Callable[..., Any], args: Sequence[Argument], dtype: np.dtype) -> int: ...

    def select(self, condition: Argument, a: Argument, b: Argument, dtype: np.dtype) -> int: ...


class _Coefficients(NamedTuple):
    """``small``: of q, ``large``: of r, lowest power first; ``top``: from where on erf is 1."""

    small: tuple[float, ...]
    large: tuple[float, ...]
    shift: float
    scale: float
    offset: float
    top: float


_FLOAT64 = _Coefficients(
    small=(
        1.1283791670955126,
        -0.37612638903183543,
        0.11283791670945006,
        -0.02686617064323777,
        0.0052239776071164225,
        -0.0008548325975389692,
        0.00012055294904839707,
        -1.492473690741966e-05,
        1.6447424703317362e-06,
        -1.6208483801871705e-07,
        1.3720064546777686e-08,
        -7.795898827002142e-10,
    ),
    large=(
        0.20798329133342885,
        0.15436117429438836,
        0.049698445403375216,
        0.012713147695154857,
        0.002479314697621277,
        0.0003316029648753461,
        1.9563578906857695e-05,
        -2.42557221161177e-06,
        -5.541125848160943e-07,
        4.551267548592995e-09,
        1.131478564144137e-08,
        2.4416129982547695e-10,
        -2.3736182042986786e-10,
    ),
    shift=3.0,
    scale=14.4,
    offset=-2.6,
    top=6.0,
)
_FLOAT32 = _Coefficients(
    small=(
        1.1283791261787373,
        -0.37612343775327806,
        0.11280316652505075,
        -0.02671505423226643,
        0.004921762027877231,
        -0.0005648059865503044,
    ),
    large=(
        0.25539564033045964,
        0.14239529609568846,
        0.026851558340176353,
        0.0029248871219909227,
        4.435395926768305e-05,
        -2.8137311883079318e-05,
    ),
    shift=2.0,
    scale=12.0,
    offset=-3.0,
    top=4.0,
)


def expand_erf(code: Code, x: Argument, dtype: np.dtype) -> int:
    """Appends erf(x) to the code and returns the number of its value."""
    c = _FLOAT64 if dtype == np.float64 else _FLOAT32

    def number(value: float) -> np.ndarray:
        return np.array(value, dtype)

    def polynomial(coefficients: Sequence[float], z: Argument) -> Argument:
        t: Argument = number(coefficients[-1])
        for value in coefficients[-2::-1]:
            t = code.emit(np.multiply, [t, z], dtype)
            t = code.emit(np.add, [t, number(value)], dtype)
        return t

    a = code.emit(np.absolute, [x], dtype)
    a = code.emit(np.minimum, [a, number(c.top)], dtype)
    z = code.emit(np.square, [a], dtype)
    u = code.emit(np.add, [a, number(c.shift)], dtype)
    u = code.emit(np.divide, [number(c.scale), u], dtype)
    u = code.emit(np.add, [u, number(c.offset)], dtype)
    large = polynomial(c.large, u)
    decay = code.emit(np.exp, [code.emit(np.negative, [z], dtype)], dtype)
    large = code.emit(np.multiply, [large, decay], dtype)
    large = code.emit(np.subtract, [number(1), large], dtype)
    small = code.emit(np.multiply, [polynomial(c.small, z), a], dtype)
    is_small = code.emit(np.less, [a, number(1)], np.dtype(bool))
    y = code.select(is_small, small, large, dtype)
    return code.emit(np.copysign, [y, x], dtype)
