/* Parts of a job, shared out to threads: torch's own OpenMP team where there is one, so that no two teams fight for the
   cores; threads made for the call in a forked child, whose team is gone, and where torch has no OpenMP. */
#ifndef ROPEWALK_THREADS_H
#define ROPEWALK_THREADS_H

#include <stdint.h>
#if !defined(_WIN32)
#include <pthread.h>
#endif

/* Does part `part` of `parts` of a job. */
typedef void (*Work)(const void *job, int64_t part, int64_t parts);

/* GOMP_parallel, the entry that libgomp, and LLVM's and Intel's OpenMP after it, keep for compiled programs. */
typedef void (*Team)(void (*run)(void *), void *data, unsigned threads, unsigned flags);

static Team team;
static int forked;

enum { MOST_THREADS = 256, PARTS_A_THREAD = 4 };

typedef struct {
    Work work;
    const void *job;
    int64_t parts, next;
} Shared;

/* Takes parts until there are none: it does not matter how many threads come. */
static void take_parts(void *data) {
    Shared *shared = data;
    for (;;) {
        int64_t part = __atomic_fetch_add(&shared->next, 1, __ATOMIC_RELAXED);
        if (part >= shared->parts) return;
        shared->work(shared->job, part, shared->parts);
    }
}

#if !defined(_WIN32)
static void *take_parts_in_thread(void *data) {
    take_parts(data);
    return NULL;
}

static void after_fork(void) { forked = 1; }
#endif

static void in_threads(Work work, const void *job, int64_t threads) {
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads <= 1) {
        work(job, 0, 1);
        return;
    }
    Shared shared = {work, job, threads * PARTS_A_THREAD, 0};
    if (team && !forked) {
        team(take_parts, &shared, (unsigned)threads, 0);
        return;
    }
#if !defined(_WIN32)
    pthread_t others[MOST_THREADS];
    int made = 0;
    /* Where no thread can be made, this one does what is left. */
    while (made < threads - 1 && pthread_create(&others[made], NULL, take_parts_in_thread, &shared) == 0) made++;
    take_parts(&shared);
    while (made) pthread_join(others[--made], NULL);
#else
    take_parts(&shared);
#endif
}

#endif
