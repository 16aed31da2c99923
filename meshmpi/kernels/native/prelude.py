"""The C that every generated file begins with: types, conversions, vectorisable functions.

Everything is branch-free so that the compiler can vectorise it, and keeps IEEE meaning for NaN and
infinities (the files are compiled without -ffinite-math-only).  exp, log and tanh of float are own
polynomials with an error of 2 units in the last place or less, because libm's vector versions come
only with flags that give up NaN and infinities.
"""

PRELUDE = r"""
#include <stdint.h>
#include <math.h>
#include <string.h>

typedef uint16_t bf16;

static inline float load_bf16(bf16 b) {
  uint32_t u = (uint32_t)b << 16; float f; memcpy(&f, &u, 4); return f;
}
static inline bf16 store_bf16(float f) {  /* round to nearest even; NaN stays NaN */
  uint32_t u; memcpy(&u, &f, 4);
  uint32_t r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (bf16)((u & 0x7fffffffu) > 0x7f800000u ? ((u >> 16) | 0x40u) : r);
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

static inline float EXP_f32(float x) {
  /* 2^n * e^r with |r| <= ln2/2; Taylor to r^7: relative error 5e-9 before rounding. */
  float n = rintf(x * 1.44269504088896341f);
  n = n > 128.0f ? 128.0f : n;
  n = n < -127.0f ? -127.0f : n;
  float r = fmaf(n, -0.693145751953125f, x);
  r = fmaf(n, -1.428606765330187045e-6f, r);
  float p = 1.9841269841e-4f;
  p = fmaf(p, r, 1.3888888889e-3f);
  p = fmaf(p, r, 8.3333333333e-3f);
  p = fmaf(p, r, 4.1666666667e-2f);
  p = fmaf(p, r, 1.6666666667e-1f);
  p = fmaf(p, r, 0.5f);
  p = fmaf(p, r, 1.0f);
  p = fmaf(p, r, 1.0f);
  int32_t i = (int32_t)n, h = i >> 1;             /* two factors: n = 128 must not overflow early */
  int32_t a = (h + 127) << 23, b = (i - h + 127) << 23;
  float fa, fb; memcpy(&fa, &a, 4); memcpy(&fb, &b, 4);
  p = p * fa * fb;
  p = x > 88.7228394f ? INFINITY : p;
  p = x < -87.3365479f ? 0.0f : p;
  return x != x ? x : p;
}
static inline float LOG_f32(float x) {
  /* 2^e * m with m in [sqrt(1/2), sqrt(2)); log m = 2 atanh((m - 1) / (m + 1)). */
  float small = x < 1.17549435e-38f ? 1.0f : 0.0f;
  float y = small != 0.0f ? x * 8388608.0f : x;
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
  float k = (float)e - (small != 0.0f ? 23.0f : 0.0f);
  float r = fmaf(k, 0.693145751953125f, fmaf(k, 1.428606765330187045e-6f, 2.0f * t));
  r = x == 0.0f ? -INFINITY : r;
  r = x < 0.0f ? NAN : r;
  r = x == INFINITY ? INFINITY : r;
  return x != x ? x : r;
}
static inline float TANH_f32(float x) {
  float a = fabsf(x), q = x * x;
  float e = EXP_f32(2.0f * a);
  float big = 1.0f - 2.0f / (e + 1.0f);
  /* Near 0 the formula cancels: odd Taylor polynomial, error below 1e-8 for |x| < 0.25. */
  float p = -1382.0f / 155925.0f;
  p = fmaf(p, q, 62.0f / 2835.0f);
  p = fmaf(p, q, -17.0f / 315.0f);
  p = fmaf(p, q, 2.0f / 15.0f);
  p = fmaf(p, q, -1.0f / 3.0f);
  float near = fmaf(p * q, x, x);
  float far = x < 0.0f ? -big : big;
  return a < 0.25f ? near : far;
}
#define LOG1P_f32(x) log1pf(x)
#define SIN_f32(x) sinf(x)
#define COS_f32(x) cosf(x)
#define ERF_f32(x) erff(x)
#define POW_f32(x, y) powf(x, y)
#define SQRT_f32(x) sqrtf(x)
#define FLOOR_f32(x) floorf(x)
#define ABS_f32(x) fabsf(x)
#define EXP_f64(x) exp(x)
#define LOG_f64(x) log(x)
#define TANH_f64(x) tanh(x)
#define LOG1P_f64(x) log1p(x)
#define SIN_f64(x) sin(x)
#define COS_f64(x) cos(x)
#define ERF_f64(x) erf(x)
#define POW_f64(x, y) pow(x, y)
#define SQRT_f64(x) sqrt(x)
#define FLOOR_f64(x) floor(x)
#define ABS_f64(x) fabs(x)
#define ABS_int(x) ((x) < 0 ? -(x) : (x))
#define SIGN(x) ((x) != (x) ? (x) : (((x) > 0) - ((x) < 0)))
#define ISFINITE(x) (((x) - (x)) == 0)
#define FLOORDIV_f32(a, b) floorf((a) / (b))
#define FLOORDIV_f64(a, b) floor((a) / (b))
#define FLOORMOD_f32(a, b) ((a) - floorf((a) / (b)) * (b))
#define FLOORMOD_f64(a, b) ((a) - floor((a) / (b)) * (b))
"""
