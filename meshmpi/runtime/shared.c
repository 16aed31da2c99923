// Collectives of ranks that map each other's memory: no message, no copy but the one that is needed.
//
// Each rank of a group has a cache line with a number, its epoch. A rank that arrives at a barrier raises its own
// and waits until those of the others have come as far. What a rank wrote before its store (release) is seen by
// whoever has read the new number (acquire). All else is local work, cut so that no two ranks write the same bytes.
#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define LINE 64
#define BLOCK 2048  // elements reduced at a time: they stay in the first-level cache
#define DIMS 5
#define PAGE 4096
#define LONG 16  // pages from which on a row is reduced in two pages side by side
#define PRIME 2147483647  // digests of calls are taken modulo this

typedef struct {
    _Alignas(LINE) _Atomic uint32_t epoch;
    _Atomic uint32_t sleepers;
} Flag;

// What a rank knows of its group; one for each set of mesh axes.
// Every field of this and of what follows has 8 bytes, as `shared.py` writes them.
typedef struct {
    int64_t ranks, me, spins;
    int64_t epoch, calls;  // barriers passed, and small reductions done, on this rank
    Flag **flags;          // of each rank
    char **slots;          // of each rank: two slots for small reductions
    int64_t slot_bytes;
} Group;

// count runs of `bytes` bytes, in `DIMS` nested loops, from one place to another.
typedef struct {
    char *to;
    const char *from;
    int64_t bytes, past_cache;  // past_cache: as in a Reduction
    int64_t n[DIMS], to_step[DIMS], from_step[DIMS];
} Copy;

// rows of `count` elements, the same rows of all ranks combined in their order and written to all targets.
typedef struct {
    int64_t rows, count, from_step, to_step, type, op, sources, targets;
    int64_t past_cache;  // whether its results are written past the caches: nobody here reads them soon
    const char **from;
    char **to;
} Reduction;

// Where a collective notes that it begins and ends: the words of meshmpi/guard/flight.py.
typedef struct {
    int64_t *count;  // of the rank; NULL: only counted here
    char *records;
    int64_t length, *channel, number, signature, entry;
    int64_t calls;
    double seconds;
} Record;

typedef struct {
    Group *group;
    Record *record;
    int64_t copies, reductions;
    const Copy *copy;
    const Reduction *reduction;
    char *small;  // a small all_reduce in place: its only reduction is done by all ranks, over the slots
} Collective;

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static inline int behind(Flag *f, uint32_t epoch) {
    return (int32_t)(atomic_load_explicit(&f->epoch, memory_order_acquire) - epoch) < 0;
}

static void wait_for(Flag *f, uint32_t epoch, int spins) {
    for (int i = 0; i < spins; i++) {
        if (!behind(f, epoch)) return;
        relax();
    }
    for (int i = 0; i < 16; i++) {
        if (!behind(f, epoch)) return;
        sched_yield();
    }
    while (behind(f, epoch)) {
        // Announced before the last look: who raises the epoch after it sees a sleeper and wakes it.
        atomic_fetch_add(&f->sleepers, 1);
        uint32_t seen = atomic_load(&f->epoch);
        if ((int32_t)(seen - epoch) < 0) {
            struct timespec limit = {1, 0};  // in case the other was killed between its two steps
            syscall(SYS_futex, &f->epoch, FUTEX_WAIT, seen, &limit, 0, 0);
        }
        atomic_fetch_sub(&f->sleepers, 1);
    }
}

static void barrier(Group *g) {
    if (g->ranks == 1) return;
    uint32_t epoch = (uint32_t)++g->epoch;
    Flag *mine = g->flags[g->me];
    atomic_exchange(&mine->epoch, epoch);  // sequentially consistent: before the look at the sleepers
    if (atomic_load(&mine->sleepers)) syscall(SYS_futex, &mine->epoch, FUTEX_WAKE, INT_MAX, 0, 0, 0);
    for (int r = 0; r < g->ranks; r++)
        if (r != g->me) wait_for(g->flags[r], epoch, g->spins);
}

static inline void line_past_cache(char *to, const char *from) {
#ifdef __SSE2__
    for (int i = 0; i < LINE; i += 16) _mm_stream_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
#else
    memcpy(to, from, LINE);
#endif
}

// A store through the caches reads the line first: a third of what a large copy moves.  Four pages are written
// side by side, as the processor fetches ahead in each page that it sees read, and in no other.
static void write_past_cache(char *to, const char *from, int64_t bytes) {
    int64_t i = -(uintptr_t)to & (LINE - 1);
    if (i > bytes) i = bytes;
    memcpy(to, from, i);
    for (; i + 4 * PAGE <= bytes; i += 4 * PAGE)
        for (int64_t k = i; k < i + PAGE; k += LINE)
            for (int64_t page = 0; page < 4 * PAGE; page += PAGE) line_past_cache(to + k + page, from + k + page);
    for (; i + LINE <= bytes; i += LINE) line_past_cache(to + i, from + i);
    memcpy(to + i, from + i, bytes - i);
}

static void copy(const Copy *c) {
    const int64_t *n = c->n, *t = c->to_step, *f = c->from_step;
    for (int64_t a = 0; a < n[0]; a++)
        for (int64_t b = 0; b < n[1]; b++)
            for (int64_t d = 0; d < n[2]; d++)
                for (int64_t e = 0; e < n[3]; e++) {
                    char *to = c->to + a * t[0] + b * t[1] + d * t[2] + e * t[3];
                    const char *from = c->from + a * f[0] + b * f[1] + d * f[2] + e * f[3];
                    if (c->past_cache) {
                        for (int64_t i = 0; i < n[4]; i++) write_past_cache(to + i * t[4], from + i * f[4], c->bytes);
                    } else if (c->n[4] == 1) {
                        memcpy(to, from, c->bytes);
                    } else if (c->bytes == 8) {
                        for (int64_t i = 0; i < n[4]; i++) *(uint64_t *)(to + i * t[4]) = *(uint64_t *)(from + i * f[4]);
                    } else if (c->bytes == 4) {
                        for (int64_t i = 0; i < n[4]; i++) *(uint32_t *)(to + i * t[4]) = *(uint32_t *)(from + i * f[4]);
                    } else {
                        for (int64_t i = 0; i < n[4]; i++) memcpy(to + i * t[4], from + i * f[4], c->bytes);
                    }
                }
}

// bfloat16 is added in float32 and rounded to even once.
static inline float widen(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

static inline uint16_t narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#define SAME(x) (x)
#define SUM(a, b) ((a) + (b))
#define PROD(a, b) ((a) * (b))
// NaN is the largest and the smallest number, as in the kernels.
#define MAX(a, b) ((a) != (a) || (a) > (b) ? (a) : (b))
#define MIN(a, b) ((a) != (a) || (a) < (b) ? (a) : (b))

#define COMBINE(NAME, TYPE, WIDE, LOAD, STORE, OP)                                                                \
    static void NAME(const Reduction *r, int64_t row, int64_t first, int64_t n) {                                 \
        WIDE total[BLOCK];                                                                                        \
        int64_t from = row * r->from_step + first * sizeof(TYPE), to = row * r->to_step + first * sizeof(TYPE);   \
        const TYPE *x = (const TYPE *)(r->from[0] + from);                                                        \
        for (int64_t i = 0; i < n; i++) total[i] = LOAD(x[i]);                                                    \
        for (int k = 1; k < r->sources; k++) {                                                                    \
            const TYPE *y = (const TYPE *)(r->from[k] + from);                                                    \
            for (int64_t i = 0; i < n; i++) {                                                                     \
                WIDE a = total[i], b = LOAD(y[i]);                                                                \
                total[i] = OP(a, b);                                                                              \
            }                                                                                                     \
        }                                                                                                         \
        if (r->past_cache) {                                                                                      \
            TYPE z[BLOCK];                                                                                        \
            for (int64_t i = 0; i < n; i++) z[i] = STORE(total[i]);                                               \
            write_past_cache(r->to[0] + to, (char *)z, n * sizeof(TYPE));                                         \
            return;                                                                                               \
        }                                                                                                         \
        for (int k = 0; k < r->targets; k++) {                                                                    \
            TYPE *z = (TYPE *)(r->to[k] + to);                                                                    \
            for (int64_t i = 0; i < n; i++) z[i] = STORE(total[i]);                                               \
        }                                                                                                         \
    }

#define ALL(NAME, TYPE, WIDE, LOAD, STORE)              \
    COMBINE(NAME##_sum, TYPE, WIDE, LOAD, STORE, SUM)   \
    COMBINE(NAME##_max, TYPE, WIDE, LOAD, STORE, MAX)   \
    COMBINE(NAME##_min, TYPE, WIDE, LOAD, STORE, MIN)   \
    COMBINE(NAME##_prod, TYPE, WIDE, LOAD, STORE, PROD)

ALL(float64, double, double, SAME, SAME)
ALL(float32, float, float, SAME, SAME)
ALL(bfloat16, uint16_t, float, widen, narrow)
ALL(int64, int64_t, int64_t, SAME, SAME)
ALL(int32, int32_t, int32_t, SAME, SAME)
ALL(uint8, uint8_t, uint8_t, SAME, SAME)

typedef void (*Combine)(const Reduction *, int64_t, int64_t, int64_t);
#define ROW(NAME) {NAME##_sum, NAME##_max, NAME##_min, NAME##_prod}
static const Combine combine[][4] = {ROW(float64), ROW(float32), ROW(bfloat16), ROW(int64), ROW(int32), ROW(uint8)};

static const int item_bytes[] = {8, 4, 2, 8, 4, 1};

// Two pages are combined side by side, for the reason that `write_past_cache` has.
static void reduce(const Reduction *r) {
    Combine f = combine[r->type][r->op];
    int64_t page = PAGE / item_bytes[r->type], part = page / 8;
    for (int64_t row = 0; row < r->rows; row++) {
        int64_t first = 0;
        for (; r->count >= LONG * page && first + 2 * page <= r->count; first += 2 * page)
            for (int64_t i = first; i < first + page; i += part) f(r, row, i, part), f(r, row, i + page, part);
        for (; first < r->count; first += BLOCK)
            f(r, row, first, r->count - first < BLOCK ? r->count - first : BLOCK);
    }
}

// One barrier is enough: the slots of a call are written again two calls on, and the barrier of the call between
// them says that all ranks have read.
static void reduce_small(const Collective *c) {
    Group *g = c->group;
    Reduction r = *c->reduction;
    int64_t at = (g->calls++ & 1) * g->slot_bytes;
    const char *from[g->ranks];
    for (int k = 0; k < g->ranks; k++) from[k] = g->slots[k] + at;
    memcpy(g->slots[g->me] + at, c->small, r.from_step);
    barrier(g);
    char *to[1] = {c->small};
    r.from = from, r.to = to, r.sources = g->ranks, r.targets = 1;
    reduce(&r);
}

static void run(const Collective *c) {
    if (c->small) {
        reduce_small(c);
        return;
    }
    barrier(c->group);  // what the others hand in is there
    for (int64_t i = 0; i < c->reductions; i++) reduce(&c->reduction[i]);
    for (int64_t i = 0; i < c->copies; i++) copy(&c->copy[i]);
#ifdef __SSE2__
    _mm_sfence();  // what went past the caches
#endif
    barrier(c->group);  // all have read, and what they wrote here is there
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

typedef struct {
    int64_t n, number, call, entry, digest;
    double began, ended;
    int64_t unused;
} Row;

void meshmpi_shared_collective(const Collective *c) {
    Record *r = c->record;
    double began = now();
    Row *row = 0;
    if (r->count) {
        int64_t n = *r->count + 1, call = r->channel[0] + 1, digest = (r->channel[1] * 31 + r->signature) % PRIME;
        row = (Row *)(r->records + n % r->length * sizeof(Row));
        *row = (Row){n, r->number, call, r->entry, digest, began, 0.0, 0};
        // Others read while this is written: the record first, then that there is one.
        atomic_thread_fence(memory_order_release);
        *(volatile int64_t *)r->count = n;
        ((volatile int64_t *)r->channel)[1] = digest;
        ((volatile int64_t *)r->channel)[0] = call;
    }
    run(c);
    double ended = now();
    if (row) *(volatile double *)&row->ended = ended;
    r->seconds += ended - began;
    r->calls++;
}
