/* The threads that all kernels of a process share: see dovetail/team.h.
 *
 * A helper that has nothing to do looks out for a loop for some microseconds, as the next is mostly near, and then sleeps.
 * A caller that has no more turns to take waits for the others' in the same way. Nobody burns time that a neighbour on the
 * machine could use, nor the time slice that the thread it waits for needs.
 *
 * The turns are cut into one range per thread, so that each reads weights in a line, and one that is done with its own
 * goes on with the others'. Helpers stay off the caller's core, as one that takes it helps nobody. Where a caller finds
 * that it waits for a thread which has begun a turn and does not run, it has that thread run on the caller's own core
 * meanwhile; where much time is lost nevertheless, it goes on with fewer threads for a time (thread_rest.h).
 */

#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#include <dovetail/team.h>

#include "thread_rest.h"

#ifdef _OPENMP
#include <omp.h>
#endif

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define MAX_THREADS MOST_THREADS
#define CACHE_LINE 128 /* processors fetch them in pairs */
#define TURN_BITS 24
#define MAX_TURNS (((int64_t)1 << TURN_BITS) - 1)

#define LOOK_OUT_NS 60000    /* for the next loop, before a helper sleeps */
#define LATE_NS 40000        /* waited for others' turns, beyond what such turns take: the thread does not run */
#define SPIN_PAUSES 16       /* between two looks at the clock */

typedef struct {
    _Alignas(CACHE_LINE) _Atomic uint64_t left; /* number of the loop, and below it the turns that nobody has begun */
    _Atomic int64_t end;
} Range;

typedef struct {
    _Alignas(CACHE_LINE) _Atomic uint32_t is_asleep;
    _Atomic int32_t is_at_work; /* has begun turns, or is about to */
    _Atomic int32_t id;         /* as the system knows it */
} Helper;

/* What one thread watches has a cache line of its own, and what changes together shares one. */
static struct {
    _Alignas(CACHE_LINE) _Atomic uint64_t number; /* of the loop under way, or of the last */
    _Alignas(CACHE_LINE) _Atomic(DovetailTurn) do_turn;
    _Atomic(const void *) loop;
    _Atomic int32_t threads;
    _Atomic int32_t caller;         /* the thread that called, as the system knows it */
    _Atomic int32_t core;           /* where it runs; -1: nobody knows */
    _Atomic uint32_t done;          /* turns, by helpers */
    _Atomic uint32_t caller_sleeps; /* until then */
    Range ranges[MAX_THREADS];
    Helper helpers[MAX_THREADS]; /* of thread i at i; the caller is 0 */
} team;

/* What only the caller that has the team touches. */
static atomic_flag is_taken = ATOMIC_FLAG_INIT;
static _Thread_local int32_t own_id; /* as the system knows this thread; 0: not asked yet */
static int32_t num_threads = 1;      /* that there are, the caller with them */
static ThreadRest rest = NO_REST;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* ---- sleeping until a word changes ---- */

#if defined(__linux__)
static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0); }
#else
static pthread_mutex_t sleepers_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t sleepers = PTHREAD_COND_INITIALIZER;

static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
    pthread_mutex_lock(&sleepers_lock);
    if (atomic_load(word) == value) pthread_cond_wait(&sleepers, &sleepers_lock);
    pthread_mutex_unlock(&sleepers_lock);
}

static void wake(_Atomic uint32_t *word) {
    (void)word;
    pthread_mutex_lock(&sleepers_lock);
    pthread_cond_broadcast(&sleepers);
    pthread_mutex_unlock(&sleepers_lock);
}
#endif

/* ---- turns ---- */

/* A turn of the range in loop `number`, or -1 where there is none left, or that loop is over. */
static int64_t take_turn(Range *range, uint64_t number) {
    uint64_t left = atomic_load_explicit(&range->left, memory_order_acquire);
    while (left >> TURN_BITS == number && (left & MAX_TURNS) != 0)
        if (atomic_compare_exchange_weak(&range->left, &left, left - 1))
            return atomic_load_explicit(&range->end, memory_order_relaxed) - (int64_t)(left & MAX_TURNS);
    return -1;
}

/* Until nobody has a turn left to begin. How many it did. What a helper reads of a loop that is over meanwhile is of no
 * consequence, since it gets no turn of it. */
static uint32_t take_turns(uint64_t number, int32_t thread, int32_t threads) {
    DovetailTurn do_turn = atomic_load_explicit(&team.do_turn, memory_order_relaxed);
    const void *loop = atomic_load_explicit(&team.loop, memory_order_relaxed);
    uint32_t count = 0;
    for (int32_t i = 0; i < threads; i++) {
        Range *range = &team.ranges[(thread + i) % threads];
        for (int64_t turn; (turn = take_turn(range, number)) >= 0; count++) do_turn(loop, turn, thread);
    }
    return count;
}

/* ---- helpers ---- */

#if defined(__linux__)
static int32_t own_core(void) { return sched_getcpu(); }

static int32_t thread_id(void) { return (int32_t)syscall(SYS_gettid); }

/* Where the caller may run, as threads of OpenMP do that it starts, but not where it does. `id` 0: this thread. */
static void keep_apart(int32_t id) {
    cpu_set_t wanted, now;
    const int32_t core = atomic_load(&team.core);
    if (sched_getaffinity(atomic_load(&team.caller), sizeof wanted, &wanted)) return;
    if (sched_getaffinity(id, sizeof now, &now)) return;
    if (core >= 0 && core < CPU_SETSIZE && CPU_COUNT(&wanted) > 1) CPU_CLR(core, &wanted);
    if (!CPU_EQUAL(&wanted, &now)) sched_setaffinity(id, sizeof wanted, &wanted);
}

/* Brings helpers that do not end their turns to the caller's core. The system would leave them where a neighbour has the
 * core for its whole time slice, as their caches are warm there. */
static void fetch_helpers(int32_t threads) {
    cpu_set_t here;
    const int32_t core = own_core();
    if (core < 0 || core >= CPU_SETSIZE) return;
    CPU_ZERO(&here);
    CPU_SET(core, &here);
    for (int32_t i = 1; i < threads; i++)
        if (atomic_load(&team.helpers[i].is_at_work)) sched_setaffinity(atomic_load(&team.helpers[i].id), sizeof here, &here);
}

static void release_helpers(int32_t threads) {
    atomic_store(&team.core, own_core());
    for (int32_t i = 1; i < threads; i++)
        if (atomic_load(&team.helpers[i].id)) keep_apart(atomic_load(&team.helpers[i].id));
}
#else
static int32_t own_core(void) { return -1; }
static int32_t thread_id(void) { return 0; }
static void keep_apart(int32_t id) { (void)id; }
static void fetch_helpers(int32_t threads) { (void)threads; }
static void release_helpers(int32_t threads) { (void)threads; }
#endif

/* Whether this helper keeps the caller from running. */
static int is_in_the_way(void) {
    const int32_t core = own_core();
    return core >= 0 && core == atomic_load_explicit(&team.core, memory_order_relaxed);
}

/* Returns the number of a loop that is not `seen`, for which the helper looks out until `end`. */
static uint64_t next_loop(Helper *own, uint64_t seen, int64_t *end) {
    for (;;) {
        for (int i = 0; i < SPIN_PAUSES; i++) {
            uint64_t number = atomic_load_explicit(&team.number, memory_order_acquire);
            if (number != seen) return number;
            pause_briefly();
        }
        if (!is_in_the_way() && now_ns() < *end) continue;
        atomic_store(&own->is_asleep, 1);
        if (atomic_load(&team.number) == seen)
            while (atomic_load(&own->is_asleep)) sleep_while(&own->is_asleep, 1);
        atomic_store(&own->is_asleep, 0);
        keep_apart(0);
        *end = now_ns() + LOOK_OUT_NS;
    }
}

static void *help(void *index) {
    const int32_t thread = (int32_t)(intptr_t)index;
    uint64_t number = 0;
    atomic_store(&team.helpers[thread].id, thread_id());
    int64_t end = now_ns() + LOOK_OUT_NS;
    for (;;) {
        number = next_loop(&team.helpers[thread], number, &end);
        int32_t threads = atomic_load_explicit(&team.threads, memory_order_relaxed);
        uint32_t count = 0;
        if (thread < threads) {
            if (is_in_the_way()) keep_apart(0);
            atomic_store(&team.helpers[thread].is_at_work, 1);
            count = take_turns(number, thread, threads);
            atomic_store(&team.helpers[thread].is_at_work, 0);
        }
        if (count == 0) continue; /* loops that need no such helper do not keep it awake */
        atomic_fetch_add(&team.done, count);
        if (atomic_load(&team.caller_sleeps)) wake(&team.done);
        end = now_ns() + LOOK_OUT_NS;
    }
    return NULL;
}

/* Has so many threads where the system allows it. */
static void grow(int32_t threads) {
    pthread_attr_t attributes;
    sigset_t all, before;
    if (pthread_attr_init(&attributes)) return;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    /* Signals are for threads that know what to do about them. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (num_threads < threads) {
        pthread_t thread;
        atomic_store(&team.helpers[num_threads].is_asleep, 0);
        atomic_store(&team.helpers[num_threads].is_at_work, 0);
        atomic_store(&team.helpers[num_threads].id, 0);
        if (pthread_create(&thread, &attributes, help, (void *)(intptr_t)num_threads)) break;
#if defined(__linux__)
        pthread_setname_np(thread, "dovetail");
#endif
        num_threads++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

/* In a process that was forked there are no helpers, and nobody waits for the loop that another thread had under way. */
static void forget_helpers(void) {
    num_threads = 1;
    own_id = 0;
    atomic_fetch_add(&team.number, 1);
    atomic_store(&team.caller_sleeps, 0);
    atomic_flag_clear(&is_taken);
}

/* ---- loops ---- */

static void begin_loop(DovetailTurn do_turn, const void *loop, int64_t turns, int32_t threads) {
    const uint64_t number = atomic_load_explicit(&team.number, memory_order_relaxed) + 1;
    if (!own_id) own_id = thread_id();
    atomic_store_explicit(&team.core, own_core(), memory_order_relaxed);
    atomic_store_explicit(&team.caller, own_id, memory_order_relaxed);
    atomic_store_explicit(&team.do_turn, do_turn, memory_order_relaxed);
    atomic_store_explicit(&team.loop, loop, memory_order_relaxed);
    atomic_store_explicit(&team.threads, threads, memory_order_relaxed);
    atomic_store_explicit(&team.done, 0, memory_order_relaxed);
    for (int32_t i = 0; i < threads; i++) {
        const int64_t begin = turns * i / threads, end = turns * (i + 1) / threads;
        atomic_store_explicit(&team.ranges[i].end, end, memory_order_relaxed);
        atomic_store_explicit(&team.ranges[i].left, number << TURN_BITS | (uint64_t)(end - begin), memory_order_release);
    }
    atomic_store(&team.number, number);
    for (int32_t i = 1; i < threads; i++)
        if (atomic_load(&team.helpers[i].is_asleep) && atomic_exchange(&team.helpers[i].is_asleep, 0))
            wake(&team.helpers[i].is_asleep);
}

/* Waits for `wanted` turns that others have begun; `patience`: ns that they may well take. */
static void end_loop(uint32_t wanted, int32_t threads, int32_t asked, int64_t began, int64_t patience) {
    int64_t now;
    do {
        for (int i = 0; i < SPIN_PAUSES; i++) {
            if (atomic_load_explicit(&team.done, memory_order_acquire) == wanted) return;
            pause_briefly();
        }
        now = now_ns();
    } while (now - began < patience);
    fetch_helpers(threads);
    atomic_store(&team.caller_sleeps, 1);
    for (uint32_t done; (done = atomic_load(&team.done)) != wanted;) sleep_while(&team.done, done);
    atomic_store(&team.caller_sleeps, 0);
    release_helpers(threads);
    now = now_ns();
    note_late(&rest, asked, now, now - began);
}

static void share(DovetailTurn do_turn, const void *loop, int64_t turns, int32_t asked) {
    const int is_mine = turns <= MAX_TURNS && !atomic_flag_test_and_set(&is_taken);
    if (is_mine) {
        if (asked > MAX_THREADS) asked = MAX_THREADS;
        int32_t threads = rest.threads < asked ? threads_at(&rest, asked, now_ns()) : asked;
        if (threads > turns) threads = (int32_t)turns;
        if (threads > num_threads) grow(threads);
        if (threads > num_threads) threads = num_threads;
        if (threads > 1) {
            const int64_t start = now_ns();
            begin_loop(do_turn, loop, turns, threads);
            const uint64_t number = atomic_load_explicit(&team.number, memory_order_relaxed);
            const uint32_t own = take_turns(number, 0, threads);
            if (own < turns) {
                const int64_t began = now_ns();
                end_loop((uint32_t)turns - own, threads, asked, began, LATE_NS + 2 * (began - start) / (own ? own : 1));
            }
            atomic_flag_clear(&is_taken);
            return;
        }
        atomic_flag_clear(&is_taken);
    }
    for (int64_t turn = 0; turn < turns; turn++) do_turn(loop, turn, 0);
}

/* What kernels are handed. */
const DovetailTeam *create_team(void) {
    static const DovetailTeam shared = {share};
    static atomic_flag is_made = ATOMIC_FLAG_INIT;
    if (!atomic_flag_test_and_set(&is_made)) pthread_atfork(NULL, NULL, forget_helpers);
    return &shared;
}

/* Has OpenMP use so many threads in what the calling thread starts; how many they were before. */
int32_t set_openmp_threads(int32_t threads) {
#ifdef _OPENMP
    const int32_t before = omp_get_max_threads();
    omp_set_num_threads(threads);
    return before;
#else
    return threads;
#endif
}

/* How many threads the next loop may have, for those who look on. */
int32_t team_limit(void) { return rest.threads + (rest.threads < MAX_THREADS && now_ns() >= rest.until); }

/* The rule by itself. */
void begin_rest(ThreadRest *own) { *own = (ThreadRest)NO_REST; }
int32_t rest_threads_at(ThreadRest *own, int32_t asked, int64_t now) { return threads_at(own, asked, now); }
void rest_note_late(ThreadRest *own, int32_t asked, int64_t now, int64_t lost) { note_late(own, asked, now, lost); }
