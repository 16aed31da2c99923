/* Products of bfloat16 matrices with float32 sums, by the dot-product instruction of AVX512-BF16.

   The interface is that of MKL's cblas_gemm_bf16bf16f32, so that they are bound like a BLAS routine;
   alpha is 1, beta 0 or 1.  Both operands are packed: a panel of A holds ROWS rows, a panel of B
   COLUMNS columns, and neighbouring k lie in pairs, as the instruction wants them.  A block of B
   stays in the second-level cache while all rows of A pass.  `integer` is the type of sizes. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef __AVX512BF16__
int bf16_supported(void) { return 0; }
#else
#include <immintrin.h>

int bf16_supported(void) { return 1; }

#define ROWS 8
#define VECTORS 3
#define COLUMNS (16 * VECTORS)
#define DEPTH 512  /* of k; even */
#define HEIGHT 96  /* rows of A packed at once; a multiple of ROWS */
#define WIDTH 768  /* columns of B packed at once; a multiple of COLUMNS */
#define PARALLEL 2000000.0  /* multiplications from which on threads share the rows of A */

typedef uint16_t bf16;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Element (row, column) of a matrix lies at row * row_step + column * column_step. */
typedef struct { const bf16 *data; int64_t row_step, column_step; } matrix;

/* Memory of this thread for packed operands; it grows and is kept, as in every BLAS.  Where there is
   none the process ends with a line that says so: a rank that fails takes the job down. */
static uint32_t *room_of(int64_t words, int which)
{
    static __thread uint32_t *room[2];
    static __thread int64_t size[2];
    if (words > size[which]) {
        free(room[which]);
        size[which] = (words + 15) / 16 * 16;
        room[which] = aligned_alloc(64, (size_t)size[which] * 4);
        if (!room[which]) {
            fprintf(stderr, "meshmpi: no memory for products of bfloat16, %lld bytes\n",
                    (long long)size[which] * 4);
            abort();
        }
    }
    return room[which];
}

static void pack_rows(const bf16 *from, int64_t step, int64_t here, int64_t depth, int64_t panel,
                      uint32_t *to)
{
    /* k lies together: a row at a time */
    for (int64_t r = 0; r < here; r++) {
        const bf16 *line = from + r * step;
        for (int64_t p = 0; p < depth / 2; p++) memcpy(to + p * panel + r, line + 2 * p, 4);
        if (depth & 1) to[depth / 2 * panel + r] = line[depth - 1];
    }
}

static void pack_lines(const bf16 *from, int64_t step, int64_t here, int64_t depth, int64_t panel,
                       uint32_t *to)
{
    /* the rows of the panel lie together: two lines of k at a time */
    for (int64_t p = 0; p < depth / 2; p++) {
        const bf16 *low = from + 2 * p * step, *high = low + step;
        uint32_t *restrict out = to + p * panel;
        for (int64_t r = 0; r < here; r++) out[r] = low[r] | (uint32_t)high[r] << 16;
    }
    if (depth & 1)
        for (int64_t r = 0; r < here; r++) to[depth / 2 * panel + r] = from[(depth - 1) * step + r];
}

/* rows x depth as out[panel][pair of k][row in panel], zeros beyond the last row */
static void pack(const matrix *x, int64_t row, int64_t rows, int64_t k, int64_t depth,
                 int64_t panel, uint32_t *out)
{
    int64_t pairs = (depth + 1) / 2;
    for (int64_t r = 0; r < rows; r += panel) {
        int64_t here = least(panel, rows - r);
        uint32_t *to = out + r * pairs;
        const bf16 *from = x->data + (row + r) * x->row_step + k * x->column_step;
        if (here < panel) memset(to, 0, (size_t)(panel * pairs) * 4);
        if (x->column_step == 1) pack_rows(from, x->row_step, here, depth, panel, to);
        else pack_lines(from, x->column_step, here, depth, panel, to);
    }
}

static inline __m512bh bits(__m512i x) { return (__m512bh)x; }

static void tile(int64_t pairs, const uint32_t *a, const uint32_t *b, float *sums)
{
    __m512 s[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) s[r][v] = _mm512_setzero_ps();
    for (int64_t p = 0; p < pairs; p++) {
        __m512bh y[VECTORS];
        for (int v = 0; v < VECTORS; v++) y[v] = bits(_mm512_loadu_si512(b + COLUMNS * p + 16 * v));
        for (int r = 0; r < ROWS; r++) {
            __m512bh x = bits(_mm512_set1_epi32((int)a[ROWS * p + r]));
            for (int v = 0; v < VECTORS; v++) s[r][v] = _mm512_dpbf16_ps(s[r][v], x, y[v]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) _mm512_storeu_ps(sums + COLUMNS * r + 16 * v, s[r][v]);
}

static void add_tile(const float *sums, int64_t rows, int64_t columns, int keep, float *c, int64_t ldc)
{
    for (int64_t r = 0; r < rows; r++) {
        float *to = c + r * ldc;
        const float *from = sums + COLUMNS * r;
        for (int64_t j = 0; j < columns; j += 16) {
            __mmask16 m = columns - j < 16 ? (__mmask16)((1u << (columns - j)) - 1) : 0xFFFF;
            __m512 x = _mm512_maskz_loadu_ps(m, from + j);
            if (keep) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(m, to + j));
            _mm512_mask_storeu_ps(to + j, m, x);
        }
    }
}

static void store_bf16(const float *sums, int64_t rows, int64_t columns, bf16 *c, int64_t ldc)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < columns; j += 16) {
            __mmask16 m = columns - j < 16 ? (__mmask16)((1u << (columns - j)) - 1) : 0xFFFF;
            __m512 x = _mm512_loadu_ps(sums + COLUMNS * r + j);
            _mm256_mask_storeu_epi16(c + r * ldc + j, m, (__m256i)_mm512_cvtneps_pbh(x));
        }
}

/* Columns j to j + width of the result, from the depth k to k + depth, with B packed. */
static void rows_of_result(const matrix *a, const uint32_t *b, int64_t i, int64_t height, int64_t j,
                           int64_t width, int64_t k, int64_t depth, int keep, void *c, int64_t ldc,
                           int narrow)
{
    float sums[ROWS * COLUMNS] __attribute__((aligned(64)));
    int64_t pairs = (depth + 1) / 2;
    uint32_t *packed = room_of(HEIGHT * pairs, 0);
    pack(a, i, height, k, depth, ROWS, packed);
    for (int64_t v = 0; v < width; v += COLUMNS)
        for (int64_t u = 0; u < height; u += ROWS) {
            int64_t rows = least(ROWS, height - u), columns = least(COLUMNS, width - v);
            int64_t at = (i + u) * ldc + j + v;
            tile(pairs, packed + u * pairs, b + v * pairs, sums);
            if (narrow) store_bf16(sums, rows, columns, (bf16 *)c + at, ldc);
            else add_tile(sums, rows, columns, keep, (float *)c + at, ldc);
        }
}

static void product(const matrix *a, const matrix *b, int64_t m, int64_t n, int64_t k, int keep,
                    void *c, int64_t ldc, int narrow)
{
    /* A result in bfloat16 is rounded once, so its sums must not be cut. */
    int64_t most = narrow ? k + (k & 1) : DEPTH;
    int64_t panels = (least(WIDTH, n) + COLUMNS - 1) / COLUMNS;
    uint32_t *packed = room_of(panels * COLUMNS * ((least(k, most) + 1) / 2), 1);
    int shared = (double)m * n * k >= PARALLEL && m > HEIGHT;
    for (int64_t j = 0; j < n; j += WIDTH)
        for (int64_t p = 0; p < k; p += most) {
            int64_t width = least(WIDTH, n - j), depth = least(most, k - p), pairs = (depth + 1) / 2;
#pragma omp parallel if (shared)
            {
#pragma omp for
                for (int64_t v = 0; v < width; v += COLUMNS)
                    pack(b, j + v, least(COLUMNS, width - v), p, depth, COLUMNS, packed + v * pairs);
#pragma omp for schedule(dynamic)
                for (int64_t i = 0; i < m; i += HEIGHT)
                    rows_of_result(a, packed, i, least(HEIGHT, m - i), j, width, p, depth,
                                   keep || p > 0, c, ldc, narrow);
            }
        }
}

static void entry(int trans_a, int trans_b, int64_t m, int64_t n, int64_t k, const bf16 *a,
                  int64_t lda, const bf16 *b, int64_t ldb, int keep, void *c, int64_t ldc, int narrow)
{
    matrix x = {a, trans_a == 111 ? lda : 1, trans_a == 111 ? 1 : lda};
    matrix y = {b, trans_b == 111 ? 1 : ldb, trans_b == 111 ? ldb : 1}; /* its columns as rows */
    product(&x, &y, m, n, k, keep, c, ldc, narrow);
}

void gemm_bf16bf16f32(int order, int trans_a, int trans_b, integer m, integer n, integer k,
                      float alpha, const bf16 *a, integer lda, const bf16 *b, integer ldb,
                      float beta, float *c, integer ldc)
{
    entry(trans_a, trans_b, m, n, k, a, lda, b, ldb, beta != 0, c, ldc, 0);
}

void gemm_bf16bf16bf16(int order, int trans_a, int trans_b, integer m, integer n, integer k,
                       float alpha, const bf16 *a, integer lda, const bf16 *b, integer ldb,
                       float beta, bf16 *c, integer ldc)
{
    entry(trans_a, trans_b, m, n, k, a, lda, b, ldb, 0, c, ldc, 1);
}
#endif
