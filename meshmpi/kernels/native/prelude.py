"""The C that every generated file begins with: types, conversions, vectorisable functions.

Everything is branch-free, so that the compiler can vectorise it, and keeps IEEE meaning.  The functions of
float are own polynomials, because libm's vector versions come only with flags that give up NaN and infinities;
their largest errors (tests/kernels/test_native.py) are 4 units in the last place.
"""

from __future__ import annotations

from meshmpi.kernels.ufunc_steps import _FLOAT32 as ERROR_FUNCTION

_BASICS = r"""
#include <stdint.h>
#include <math.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#define threads_here() omp_get_num_threads()
#define thread_here() omp_get_thread_num()
static inline int at_most(int n) { return omp_get_max_threads() < n ? omp_get_max_threads() : n; }
#else
#define threads_here() 1
#define thread_here() 0
#endif

typedef uint16_t bf16;

static inline float load_bf16(bf16 b) {
  uint32_t u = (uint32_t)b << 16; float f; memcpy(&f, &u, 4); return f;
}
static inline bf16 store_bf16(float f) {  /* round to nearest even; NaN stays NaN */
  uint32_t u; memcpy(&u, &f, 4);
  uint32_t r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (bf16)((u & 0x7fffffffu) > 0x7f800000u ? ((u >> 16) | 0x40u) : r);
}
static inline float round_bf16(float f) {
  uint32_t u; memcpy(&u, &f, 4);
  uint32_t r = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
  r = (u & 0x7fffffffu) > 0x7f800000u ? u : r;
  memcpy(&f, &r, 4); return f;
}

/* Order-preserving integer keys: the largest key is the largest number, and NaN beats all. */
static inline int32_t key_f32(float f) {
  int32_t u; memcpy(&u, &f, 4);
  int32_t k = u ^ ((u >> 31) & 0x7fffffff);
  return (u & 0x7fffffff) > 0x7f800000 ? 0x7fffffff : k;
}
static inline float unkey_f32(int32_t k) {
  int32_t u = k ^ ((k >> 31) & 0x7fffffff); float f; memcpy(&f, &u, 4); return f;
}
static inline int64_t key_f64(double f) {
  int64_t u; memcpy(&u, &f, 8);
  int64_t k = u ^ ((u >> 63) & INT64_MAX);
  return (u & INT64_MAX) > 0x7ff0000000000000LL ? INT64_MAX : k;
}
static inline double unkey_f64(int64_t k) {
  int64_t u = k ^ ((k >> 63) & INT64_MAX); double f; memcpy(&f, &u, 8); return f;
}

#define MAXIMUM(a, b) (((a) > (b) || (a) != (a)) ? (a) : (b))
#define MINIMUM(a, b) (((a) < (b) || (a) != (a)) ? (a) : (b))
#define SIGN(x) ((x) != (x) ? (x) : (((x) > 0) - ((x) < 0)))
static inline uint8_t ISFINITE_f32(float x) {  /* x - x == 0 may be simplified away */
  uint32_t u; memcpy(&u, &x, 4); return (u & 0x7f800000u) != 0x7f800000u;
}
static inline uint8_t ISFINITE_f64(double x) {
  uint64_t u; memcpy(&u, &x, 8);
  return (u & 0x7ff0000000000000ull) != 0x7ff0000000000000ull;
}
"""

_FUNCTIONS = r"""
static inline float EXP_f32(float x) {
  /* 2^n * e^r with |r| <= ln2/2; minimax to r^6: relative error 4e-9 before rounding.  2^n goes
     into the exponent of e^r, one addition of integers.  What lies outside of normal numbers is
     chosen at the end: results below 2^-126 are 0 (NumPy's have fewer digits there); NaN stays. */
  float n = rintf(x * 1.44269504088896341f);
  float r = fmaf(n, -0.693145751953125f, x);
  r = fmaf(n, -1.428606765330187045e-6f, r);
  float p = 1.3814539988e-3f;
  p = fmaf(p, r, 8.3687451164e-3f);
  p = fmaf(p, r, 4.1668390787e-2f);
  p = fmaf(p, r, 0.16666520399f);
  p = fmaf(p, r, 0.49999993432f);
  p = fmaf(p, r, 1.0f);
  p = fmaf(p, r, 1.0f);
  int32_t u; memcpy(&u, &p, 4);
  u += (int32_t)((uint32_t)(int32_t)n << 23);
  float y; memcpy(&y, &u, 4);
  y = x > 88.72283f ? INFINITY : y;
  return x < -87.33654f ? 0.0f : y;
}
static inline float LOG_f32(float x) {
  /* 2^e * m with m in [sqrt(1/2), sqrt(2)); log m = 2 atanh((m - 1) / (m + 1)). */
  int small = x < 1.17549435e-38f;
  float y = small ? x * 8388608.0f : x;
  int32_t u; memcpy(&u, &y, 4);
  int32_t e = ((u - 0x3f3504f3) >> 23);
  int32_t v = u - (e << 23);
  float m; memcpy(&m, &v, 4);
  float s = (m - 1.0f) / (m + 1.0f), q = s * s;
  float p = 0.0909090909f;
  p = fmaf(p, q, 0.1111111111f);
  p = fmaf(p, q, 0.1428571429f);
  p = fmaf(p, q, 0.2f);
  p = fmaf(p, q, 0.3333333333f);
  float t = fmaf(p * q, s, s);
  float k = (float)e - (small ? 23.0f : 0.0f);
  float r = fmaf(k, 0.693145751953125f, fmaf(k, 1.428606765330187045e-6f, 2.0f * t));
  r = x == 0.0f ? -INFINITY : r;
  r = x < 0.0f ? NAN : r;
  r = x == INFINITY ? INFINITY : r;
  return x != x ? x : r;
}
static inline float LOG1P_f32(float x) {
  /* log u + what rounding u = 1 + x lost, divided by u. */
  float u = 1.0f + x;
  float c = (x - (u - 1.0f)) / u;
  float r = LOG_f32(u) + c;
  r = u == 1.0f ? x : r;
  r = x == -1.0f ? -INFINITY : r;
  return x == INFINITY ? x : r;
}
static inline float TANH_f32(float x) {
  float a = fabsf(x), q = x * x;
  float e = EXP_f32(2.0f * a);
  float big = 1.0f - 2.0f / (e + 1.0f);
  /* Near 0 that cancels: Chebyshev interpolant of degree 6, error 1e-9 for |x| < 0.65. */
  float p = 2.2149027e-3f;
  p = fmaf(p, q, -8.2724567e-3f);
  p = fmaf(p, q, 2.1746187e-2f);
  p = fmaf(p, q, -5.3956349e-2f);
  p = fmaf(p, q, 0.13333291f);
  p = fmaf(p, q, -0.33333333f);
  float near = fmaf(p * q, x, x);
  float far = copysignf(big, x);
  return a < 0.65f ? near : far;
}
static inline float ERF_f32(float x) {
  /* As meshmpi.kernels.ufunc_steps: x q(x^2) below 1, 1 - exp(-x^2) r(u) above. */
  float a = fabsf(x);
  a = a > %(top)s ? %(top)s : a;
  float z = a * a;
  float u = %(scale)s / (a + %(shift)s) + %(offset)s;
  float r = 0.0f, q = 0.0f;
%(large)s
%(small)s
  float big = 1.0f - EXP_f32(-z) * r;
  return copysignf(a < 1.0f ? q * a : big, x);
}
"""

_DIVISIONS = r"""
/* Division rounded down and its remainder by Python's rules, as NumPy has them. */
#define DIVISION(T, suffix, f)                                                   \
  static inline T FLOORMOD_##suffix(T a, T b) {                                  \
    T m = fmod##f(a, b);                                                         \
    if (b == 0) return m;                                                        \
    if (m == 0) return copysign##f(0, b);                                        \
    return (b < 0) != (m < 0) ? m + b : m;                                       \
  }                                                                              \
  static inline T FLOORDIV_##suffix(T a, T b) {                                  \
    if (b == 0) return a / b;                                                    \
    T m = fmod##f(a, b), d = (a - m) / b;                                        \
    if (m != 0 && (b < 0) != (m < 0)) d -= 1;                                    \
    if (d == 0) return copysign##f(0, a / b);                                    \
    T whole = floor##f(d);                                                       \
    return d - whole > (T)0.5 ? whole + 1 : whole;                               \
  }
DIVISION(float, f32, f)
DIVISION(double, f64, )

#define WHOLE(T, name)                                                           \
  static inline T floordiv_##name(T a, T b) {  /* 0 for b = 0, as NumPy */       \
    if (b == 0) return 0;                                                        \
    if ((T)-1 < 0 && b == (T)-1) return -a;  /* the processor traps on MIN/-1 */ \
    T q = a / b;                                                                 \
    return q - (a % b != 0 && (a < 0) != (b < 0));                               \
  }                                                                              \
  static inline T floormod_##name(T a, T b) {                                    \
    return b == 0 ? 0 : a - floordiv_##name(a, b) * b;                           \
  }                                                                              \
  static inline T power_##name(T x, T y) {                                       \
    if (y < 0) return x == 1 ? 1 : x == (T)-1 ? ((y & 1) ? x : 1) : 0;           \
    T p = 1;                                                                     \
    for (; y; y >>= 1, x *= x) if (y & 1) p *= x;                                \
    return p;                                                                    \
  }
WHOLE(int32_t, int32)
WHOLE(int64_t, int64)
WHOLE(uint8_t, uint8)
"""

_RANDOM = r"""
/* The generator of meshmpi.kernels.random_numbers: y = counter * key. */
static inline uint32_t squares(uint64_t y, uint64_t key) {
  uint64_t z = y + key, x = y * y + y;
  x = (x >> 32) | (x << 32); x = x * x + z;
  x = (x >> 32) | (x << 32); x = x * x + y;
  x = (x >> 32) | (x << 32);
  return (uint32_t)((x * x + z) >> 32);
}
static inline float uniform_float32(uint64_t y, uint64_t key) {
  return (float)(int32_t)(squares(y, key) >> 8) * 0x1p-24f;
}
static inline float uniform_bfloat16(uint64_t y, uint64_t key) {  /* cut, to stay below 1 */
  float f = uniform_float32(y, key); uint32_t u;
  memcpy(&u, &f, 4); u &= 0xffff0000u; memcpy(&f, &u, 4); return f;
}
static inline double uniform_float64(uint64_t y, uint64_t key) {
  double high = (double)(int32_t)(squares(y, key) >> 5);
  double low = (double)(int32_t)(squares(y + (key << 49), key) >> 6);  /* 2 draws on */
  return (high * 67108864.0 + low) * 0x1p-53;
}
"""


_LIBM = {"SIN": "sin", "COS": "cos", "POW": "pow", "SQRT": "sqrt", "FLOOR": "floor", "ABS": "fabs"}
_DOUBLE_LIBM = {"EXP": "exp", "LOG": "log", "TANH": "tanh", "LOG1P": "log1p", "ERF": "erf", **_LIBM}


def _from_libm() -> str:
    of_float = [f"#define {name}_f32 {function}f" for name, function in _LIBM.items()]
    return "\n".join([*of_float, *(f"#define {name}_f64 {f}" for name, f in _DOUBLE_LIBM.items())])


def _horner(name: str, coefficients: tuple[float, ...], z: str) -> str:
    return "\n".join(f"  {name} = fmaf({name}, {z}, {c!r}f);" for c in reversed(coefficients))


_NO_MEMORY = """
/* Nothing is allocated in a step: what a kernel needs lies in the planned workspace. */
#pragma GCC poison malloc calloc realloc aligned_alloc free
"""


def _prelude() -> str:
    c = ERROR_FUNCTION
    numbers = {
        "top": f"{c.top!r}f",
        "scale": f"{c.scale!r}f",
        "shift": f"{c.shift!r}f",
        "offset": f"({c.offset!r}f)",
        "large": _horner("r", c.large, "u"),
        "small": _horner("q", c.small, "z"),
    }
    return _BASICS + _FUNCTIONS % numbers + _from_libm() + _DIVISIONS + _RANDOM + _NO_MEMORY


PRELUDE = _prelude()
