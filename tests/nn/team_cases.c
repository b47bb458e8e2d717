/* Loops for test_team.py. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#include <dovetail/team.h>

typedef struct {
    _Atomic int32_t *visits; /* of each turn */
    _Atomic int32_t *threads; /* that did each turn, and -1 */
    int64_t turns;
    _Atomic int64_t done;
    _Atomic int32_t num_held; /* turns that a helper has begun and does not end before all others are done */
    int64_t held_ns;          /* nor for so long after that */
} Loop;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void visit(const void *loop, int64_t turn, int32_t thread) {
    Loop *l = (Loop *)loop;
    l->visits[turn]++;
    l->threads[turn] = thread;
    l->done++;
}

void visit_all(int32_t *visits, int32_t *who, int64_t turns, int32_t threads) {
    Loop loop = {(_Atomic int32_t *)visits, (_Atomic int32_t *)who, turns, 0, 0, 0};
    dovetail_share(visit, &loop, turns, threads);
}

/* The helper is stuck in its first turn until all others are done; the caller begins when the helper has, or after a
 * second. */
static void visit_beside_stuck(const void *loop, int64_t turn, int32_t thread) {
    Loop *l = (Loop *)loop;
    if (thread == 0) {
        for (int64_t end = now_ns() + 1000000000; !l->num_held && now_ns() < end;) sched_yield();
    } else if (!l->num_held++) {
        while (l->done < l->turns - 1) sched_yield();
        for (int64_t end = now_ns() + l->held_ns; now_ns() < end;) sched_yield();
    }
    visit(loop, turn, thread);
}

/* How many helpers were stuck. */
int32_t visit_all_beside_stuck(int32_t *visits, int32_t *who, int64_t turns, int64_t held_ns) {
    Loop loop = {(_Atomic int32_t *)visits, (_Atomic int32_t *)who, turns, 0, 0, held_ns};
    dovetail_share(visit_beside_stuck, &loop, turns, 2);
    return loop.num_held;
}
