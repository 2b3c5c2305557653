/* Parts of a job, distributed over threads. The threads are torch's OpenMP team if there is one, so that two teams do
   not compete for the cores. A forked child, which has lost its team, and builds of torch without OpenMP create threads
   for each call. */
#ifndef ROPEWALK_THREADS_H
#define ROPEWALK_THREADS_H

#include <stdint.h>
#if !defined(_WIN32)
#include <pthread.h>
#endif

/* Processes part number `part` of `parts` parts of a job. */
typedef void (*Work)(const void *job, int64_t part, int64_t parts);

/* GOMP_parallel, the entry point for compiled programs of libgomp, which LLVM's and Intel's OpenMP also provide. */
typedef void (*Team)(void (*run)(void *), void *data, unsigned threads, unsigned flags);

static Team team;
static int forked;

enum { MOST_THREADS = 256, PARTS_PER_THREAD = 4 };

typedef struct {
    Work work;
    const void *job;
    int64_t parts, next;
} Shared;

/* Process parts until none is left. Any number of threads may run this. */
static void process_parts(void *data) {
    Shared *shared = data;
    for (;;) {
        int64_t part = __atomic_fetch_add(&shared->next, 1, __ATOMIC_RELAXED);
        if (part >= shared->parts) return;
        shared->work(shared->job, part, shared->parts);
    }
}

#if !defined(_WIN32)
static void *process_parts_in_thread(void *data) {
    process_parts(data);
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
    Shared shared = {work, job, threads * PARTS_PER_THREAD, 0};
    if (team && !forked) {
        team(process_parts, &shared, (unsigned)threads, 0);
        return;
    }
#if !defined(_WIN32)
    pthread_t others[MOST_THREADS];
    int created = 0;
    /* If no more threads can be created, this thread processes the remaining parts. */
    while (created < threads - 1 && pthread_create(&others[created], NULL, process_parts_in_thread, &shared) == 0)
        created++;
    process_parts(&shared);
    while (created) pthread_join(others[--created], NULL);
#else
    process_parts(&shared);
#endif
}

#endif
