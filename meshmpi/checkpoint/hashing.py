"""The hash of checkpoints: XXH3 of 64 bits, of pieces of fixed length; in C, or slowly in NumPy.

It is there to find damage, not forgery.  One flipped bit always changes the sums that it is made
of; for any other damage the chance that nothing shows is about 2**-64 a piece.
Source of the algorithm: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np

from meshmpi.kernels.native.compiler import CompilerError, load_library

NAME = "xxh3-64"
PIECE_BYTES = 1 << 20
"""Bytes under one hash: what has to be read to trust any part of them.  Assumption."""
LEAST_BYTES = 256
"""Shorter pieces are padded with zeros to this: XXH3 has other rules for short ones."""
_STRIPE, _BLOCK = 64, 1024  # bytes
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578"
    "825ad07dccff7221b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea3"
    "71644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931"
    "c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_P32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_P64 = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)  # fmt: skip
_START = (_P32[2], _P64[0], _P64[1], _P64[2], _P64[3], _P32[1], _P64[4], _P32[0])
_AVALANCHE = 0x165667919E3779F9
_ALL = (1 << 64) - 1

_SOURCE = r"""
#include <stdint.h>
#include <string.h>
typedef uint64_t u64;
#define PRIME %(p32)dULL
static const unsigned char secret[192] = {%(secret)s};
static inline u64 word(const unsigned char *p) { u64 x; memcpy(&x, p, 8); return x; }
#if defined(__AVX512F__)
#include <immintrin.h>
typedef __m512i lanes;  /* the eight sums; GCC does not find these instructions by itself */
#define PARTS 1
static inline lanes added(lanes sum, const unsigned char *p, const unsigned char *s) {
  lanes x = _mm512_loadu_si512(p), key = _mm512_xor_si512(x, _mm512_loadu_si512(s));
  sum = _mm512_add_epi64(sum, _mm512_shuffle_epi32(x, _MM_PERM_BADC));
  return _mm512_add_epi64(sum, _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32)));
}
static inline lanes mixed(lanes sum, const unsigned char *s) {
  lanes x = _mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47)), p = _mm512_set1_epi64(PRIME);
  x = _mm512_xor_si512(x, _mm512_loadu_si512(s));
  lanes high = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), p);
  return _mm512_add_epi64(_mm512_mul_epu32(x, p), _mm512_slli_epi64(high, 32));
}
#elif defined(__AVX2__)
#include <immintrin.h>
typedef __m256i lanes;
#define PARTS 2
static inline lanes added(lanes sum, const unsigned char *p, const unsigned char *s) {
  lanes x = _mm256_loadu_si256((const lanes *)p);
  lanes key = _mm256_xor_si256(x, _mm256_loadu_si256((const lanes *)s));
  sum = _mm256_add_epi64(sum, _mm256_shuffle_epi32(x, _MM_SHUFFLE(1, 0, 3, 2)));
  return _mm256_add_epi64(sum, _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32)));
}
static inline lanes mixed(lanes sum, const unsigned char *s) {
  lanes x = _mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47)), p = _mm256_set1_epi64x(PRIME);
  x = _mm256_xor_si256(x, _mm256_loadu_si256((const lanes *)s));
  lanes high = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), p);
  return _mm256_add_epi64(_mm256_mul_epu32(x, p), _mm256_slli_epi64(high, 32));
}
#else
typedef struct { u64 x[8]; } lanes;
#define PARTS 1
static inline lanes added(lanes sum, const unsigned char *p, const unsigned char *s) {
  for (int i = 0; i < 8; i++) {
    u64 key = word(p + 8 * i) ^ word(s + 8 * i);
    sum.x[i] += word(p + 8 * (i ^ 1)) + (key & 0xffffffffu) * (key >> 32);
  }
  return sum;
}
static inline lanes mixed(lanes sum, const unsigned char *s) {
  for (int i = 0; i < 8; i++)
    sum.x[i] = (sum.x[i] ^ sum.x[i] >> 47 ^ word(s + 8 * i)) * PRIME;
  return sum;
}
#endif
#define STRIPES(n)                                                                       \
  for (int64_t k = 0; k < (n); k++)                                                      \
    for (int h = 0; h < PARTS; h++)                                                      \
      l[h] = added(l[h], p + 64 * k + h * sizeof(lanes), s + 8 * k + h * sizeof(lanes));
static inline u64 folded(u64 a, u64 b) {
  unsigned __int128 product = (unsigned __int128)a * b;
  return (u64)product ^ (u64)(product >> 64);
}
static u64 piece_hash(const unsigned char *p, int64_t n) {
  u64 sum[8] = {%(start)s};
  int64_t blocks = (n - 1) / 1024, rest = (n - 1 - blocks * 1024) / 64;
  const unsigned char *s = secret;
  lanes l[PARTS];
  memcpy(l, sum, 64);
  for (int64_t b = 0; b < blocks; b++, p += 1024) {
    #pragma GCC unroll 16
    STRIPES(16)
    for (int h = 0; h < PARTS; h++) l[h] = mixed(l[h], secret + 128 + h * sizeof(lanes));
  }
  STRIPES(rest)
  p += n - blocks * 1024 - 64, s += 121;
  STRIPES(1)
  memcpy(sum, l, 64);
  u64 h = (u64)n * %(p64)dULL;
  for (int i = 0; i < 4; i++)
    h += folded(sum[2 * i] ^ word(secret + 11 + 16 * i),
                sum[2 * i + 1] ^ word(secret + 19 + 16 * i));
  h = (h ^ h >> 37) * %(avalanche)dULL;
  return h ^ h >> 32;
}
void hash_pieces(const unsigned char *data, int64_t n, int64_t piece, u64 *out) {
  for (int64_t a = 0; a < n; a += piece) {
    int64_t m = n - a < piece ? n - a : piece;
    if (m >= %(least)d) { *out++ = piece_hash(data + a, m); continue; }
    unsigned char padded[%(least)d] = {0};
    memcpy(padded, data + a, m);
    *out++ = piece_hash(padded, %(least)d);
  }
}
"""


def hashes(data: np.ndarray) -> np.ndarray:
    """The hash of each piece of PIECE_BYTES, the last perhaps shorter.

    Args:
        data: uint8[n], contiguous.

    Returns:
        uint64[ceil(n / PIECE_BYTES)].
    """
    out = np.empty(-(-data.size // PIECE_BYTES), np.uint64)
    library = _library()
    if library is not None:
        _fill(library, data, PIECE_BYTES, out)
        return out
    for k in range(out.size):
        out[k] = _piece_hash(data[k * PIECE_BYTES : (k + 1) * PIECE_BYTES])
    return out


def hash_of(data: bytes) -> int:
    """The hash of a text as one piece, however long it is."""
    array, library = np.frombuffer(data, np.uint8), _library()
    if library is None or not array.size:
        return _piece_hash(array)
    out = np.empty(1, np.uint64)
    _fill(library, array, array.size, out)
    return int(out[0])


def _fill(library: ctypes.CDLL, data: np.ndarray, piece: int, out: np.ndarray) -> None:
    library.hash_pieces(
        ctypes.c_void_p(data.ctypes.data), ctypes.c_int64(data.size), ctypes.c_int64(piece),
        ctypes.c_void_p(out.ctypes.data),
    )  # fmt: skip


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    """The library, or None where none can be built or its hashes are wrong."""
    try:
        library = load_library(_source())
    except CompilerError:
        return None
    tried = np.arange(5 * _BLOCK + 77, dtype=np.uint64).view(np.uint8)
    out = np.zeros(1, np.uint64)
    _fill(library, tried, tried.size, out)
    return library if int(out[0]) == _piece_hash(tried) else None


def _source() -> str:
    return _SOURCE % {
        "secret": ", ".join(map(str, _SECRET)), "start": ", ".join(f"{x}ULL" for x in _START),
        "p32": _P32[0], "p64": _P64[0], "avalanche": _AVALANCHE, "least": LEAST_BYTES,
    }  # fmt: skip


def _words(start: int) -> np.ndarray:
    return np.frombuffer(_SECRET[start : start + _STRIPE], "<u8")


def _stripes(data: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """What stripes add to the eight sums: data uint8[..., n, 64], keys uint64[n, 8]."""
    words = data.view("<u8")
    key = words ^ keys
    added = words[..., [1, 0, 3, 2, 5, 4, 7, 6]] + (key & np.uint64(0xFFFFFFFF)) * (key >> 32)
    return added.sum(-2, dtype=np.uint64)


def _piece_hash(data: np.ndarray) -> int:
    """The hash of one piece, in NumPy: the meaning of the C."""
    n = data.size
    if n < LEAST_BYTES:
        data, n = np.concatenate([data, np.zeros(LEAST_BYTES - n, np.uint8)]), LEAST_BYTES
    keys = np.stack([_words(8 * k) for k in range(_BLOCK // _STRIPE)])
    sums, last = np.array(_START, np.uint64), _words(len(_SECRET) - _STRIPE)
    blocks = (n - 1) // _BLOCK
    whole = data[: blocks * _BLOCK].reshape(blocks, _BLOCK // _STRIPE, _STRIPE)
    for added in _stripes(whole, keys):
        sums += added
        sums ^= sums >> np.uint64(47)
        sums ^= last
        sums *= np.uint64(_P32[0])
    rest = (n - 1 - blocks * _BLOCK) // _STRIPE
    tail = data[blocks * _BLOCK : blocks * _BLOCK + rest * _STRIPE].reshape(rest, _STRIPE)
    sums += _stripes(tail, keys[:rest])
    sums += _stripes(data[-_STRIPE:].reshape(1, _STRIPE), _words(len(_SECRET) - _STRIPE - 7))
    return _merged(sums, n)


def _merged(sums: np.ndarray, n: int) -> int:
    h = n * _P64[0]
    for i in range(4):
        a = int(sums[2 * i]) ^ int.from_bytes(_SECRET[11 + 16 * i : 19 + 16 * i], "little")
        b = int(sums[2 * i + 1]) ^ int.from_bytes(_SECRET[19 + 16 * i : 27 + 16 * i], "little")
        h += (a * b & _ALL) ^ (a * b >> 64)
    h &= _ALL
    h = (h ^ h >> 37) * _AVALANCHE & _ALL
    return h ^ h >> 32
