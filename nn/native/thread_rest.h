/* How many threads the team goes on with after some did not run: a rule that is told times and reads no clock.
 *
 * Where a thread is late, there is one less for a time in proportion to the time lost, and longer when that happens again
 * soon after there was one more. What is little beside the time for which all went well is borne.
 */

#ifndef DOVETAIL_THREAD_REST_H
#define DOVETAIL_THREAD_REST_H

#include <stdint.h>

#define MOST_THREADS 256
#define REST_FACTOR 8      /* a time lost costs so many times as long with a thread less, */
#define MAX_REST_FACTOR 64 /* doubled up to this while it happens again */
#define SOON_NS 20000000   /* so soon, which is some time slices, */
#define MAX_REST_NS 500000000 /* and at most so long */
#define WORTH_NS(well) ((well) / 4) /* a time lost that is less, of the time for which all went well, is borne */

typedef struct {
    int32_t threads; /* no more than these */
    int64_t until;   /* ns: from then on there may be one more */
    int64_t raised;  /* ns: when there was one more */
    int64_t well;    /* ns: since then no thread was late */
    int64_t time;    /* ns that the last rest took */
    int64_t factor;  /* of the time lost before it */
} ThreadRest;

#define NO_REST {MOST_THREADS, 0, 0, 0, 0, REST_FACTOR}

/* How many of the threads that are asked for the loop may have that begins now. */
static inline int32_t threads_at(ThreadRest *rest, int32_t asked, int64_t now) {
    if (rest->threads >= asked) return asked;
    if (now >= rest->until) {
        rest->threads++;
        rest->raised = rest->well = now;
        rest->until = now + rest->time;
    }
    return rest->threads;
}

/* A thread did not run when it should have, and the loop that ends now took so much longer. One less of all those that
 * callers ask for, even where this loop had turns for a few only: the system then finds cores for the others. */
static inline void note_late(ThreadRest *rest, int32_t asked, int64_t now, int64_t lost) {
    const int64_t well = now - lost - rest->well;
    rest->well = now;
    if (lost < WORTH_NS(well)) return; /* now and then: the system's own work, or a turn that took longer than others */
    const int happens_again = now - rest->raised < SOON_NS;
    const int32_t most = rest->threads < asked ? rest->threads : asked;
    rest->factor = !happens_again ? REST_FACTOR : rest->factor < MAX_REST_FACTOR ? 2 * rest->factor : MAX_REST_FACTOR;
    rest->time = lost < MAX_REST_NS / rest->factor ? lost * rest->factor : MAX_REST_NS;
    rest->threads = most > 1 ? most - 1 : 1;
    rest->until = now + rest->time;
}

#endif
