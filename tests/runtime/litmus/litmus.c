// Processes that map one region run the barriers and collectives of shared.c, with pauses at random places, and look
// at every number that they read: litmus RANKS ROUNDS SPINS. Exit status 1: one was not what it must be.
#include "shared.c"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define MOST 16
#define WORDS 4099  // of an array: no multiple of a line, more than a block of a reduction
#define SMALL 7

typedef struct {
    Flag flag;
    char slots[2][256];
    volatile int64_t note;
    float in[WORDS], out[WORDS];
} Part;

static Part *parts[MOST];
static uint64_t seed;

static uint32_t drawn(void) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return seed >> 33;
}

static void pause_somewhere(void) {
    uint32_t kind = drawn() % 64;
    if (kind == 0) {
        struct timespec t = {0, 20000 + drawn() % 200000};
        nanosleep(&t, 0);
    } else if (kind < 8) {
        sched_yield();
    } else {
        for (volatile uint32_t i = drawn() % 256; i; i--) {}
    }
}

static void must(int right, const char *what, int64_t round, int rank, int other, double found, double wanted) {
    if (right) return;
    printf("round %ld, rank %d: %s of rank %d is %g, not %g\n", (long)round, rank, what, other, found, wanted);
    fflush(stdout);
    _exit(1);
}

static void run_rank(int ranks, int me, int64_t rounds, int64_t spins) {
    Flag *flags[MOST];
    char *slots[MOST];
    const char *from[MOST];
    for (int r = 0; r < ranks; r++) flags[r] = &parts[r]->flag, slots[r] = parts[r]->slots[0];
    Group group = {ranks, me, spins, 0, 0, flags, slots, 256};
    Record record = {0};
    seed = 1 + me;
    float x[SMALL];
    Reduction small = {1, SMALL, sizeof x, sizeof x, 1, 0, 0, 0, 0, 0, 0};
    // Each rank sums the array of all into its own, and copies the input of the next rank behind a barrier.
    char *to[1] = {(char *)parts[me]->out};
    for (int r = 0; r < ranks; r++) from[r] = (char *)parts[r]->in;
    for (int64_t round = 1; round <= rounds; round++) {
        parts[me]->note = round * ranks + me;
        pause_somewhere();
        barrier(&group);
        for (int r = 0; r < ranks; r++) {
            int64_t note = parts[r]->note;
            must(note == round * ranks + r, "the note", round, me, r, note, round * ranks + r);
        }
        pause_somewhere();
        barrier(&group);
        for (int times = 0; times < 3; times++) {
            for (int i = 0; i < SMALL; i++) x[i] = (float)(round % 1000 + me + i + times);
            Collective c = {&group, &record, 0, 0, 0, &small, (char *)x};
            meshmpi_shared_collective(&c);
            for (int i = 0; i < SMALL; i++) {
                float wanted = (float)(ranks * (round % 1000 + i + times) + ranks * (ranks - 1) / 2);
                must(x[i] == wanted, "the small sum", round, me, i, x[i], wanted);
            }
            pause_somewhere();
        }
        for (int i = 0; i < WORDS; i++) parts[me]->in[i] = (float)((round + i) % 1000 + me);
        Reduction all = {1, WORDS, 0, 0, 1, 0, ranks, 1, round & 1, from, to};
        Collective c = {&group, &record, 0, 1, 0, &all, 0};
        meshmpi_shared_collective(&c);
        for (int i = 0; i < WORDS; i++) {
            float wanted = (float)(ranks * ((round + i) % 1000) + ranks * (ranks - 1) / 2);
            must(parts[me]->out[i] == wanted, "the sum", round, me, i, parts[me]->out[i], wanted);
        }
        int next = (me + 1) % ranks;
        Copy one = {(char *)parts[me]->out, (char *)parts[next]->in, WORDS * 4, round & 1, {1, 1, 1, 1, 1}, {0}, {0}};
        Collective copying = {&group, &record, 1, 0, &one, 0, 0};
        meshmpi_shared_collective(&copying);
        for (int i = 0; i < WORDS; i++) parts[me]->in[i] = -1.0f;  // all have read it
        for (int i = 0; i < WORDS; i++) {
            float wanted = (float)((round + i) % 1000 + next);
            must(parts[me]->out[i] == wanted, "the copy", round, me, i, parts[me]->out[i], wanted);
        }
    }
    _exit(0);
}

int main(int count, char **words) {
    if (count != 4) return 2;
    int ranks = atoi(words[1]), wrong = 0;
    size_t bytes = (sizeof(Part) + PAGE) / PAGE * PAGE;
    char *region = mmap(0, ranks * bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (region == MAP_FAILED || ranks > MOST) return 2;
    for (int r = 0; r < ranks; r++) parts[r] = (Part *)(region + r * bytes);
    for (int r = 0; r < ranks; r++)
        if (!fork()) run_rank(ranks, r, atoll(words[2]), atoll(words[3]));
    for (int r = 0; r < ranks; r++) {
        int status;
        if (wait(&status) < 0 || status) {
            wrong = 1;
            kill(0, SIGKILL);
        }
    }
    return wrong;
}
