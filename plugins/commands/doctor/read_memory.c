/* Reads memory as fast as the machine can: what no kernel that streams weights can beat. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#else
#include <time.h>
static int omp_get_num_threads(void) { return 1; }
static int omp_get_thread_num(void) { return 0; }
static double omp_get_wtime(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}
#endif

/* As wide as a register: wider ones are put together in memory. */
#if defined(__AVX512F__)
typedef uint64_t lanes __attribute__((vector_size(64)));
#elif defined(__AVX2__)
typedef uint64_t lanes __attribute__((vector_size(32)));
#else
typedef uint64_t lanes __attribute__((vector_size(16)));
#endif

#define NUM_LANES (sizeof(lanes) / sizeof(uint64_t))
#define STRIDE (8 * sizeof(lanes))

/* Independent accumulators, or the additions' latency would be measured instead of the memory. */
static uint64_t sum_of(const char *data, size_t num_bytes)
{
    lanes a = {0}, b = {0}, c = {0}, d = {0}, e = {0}, f = {0}, g = {0}, h = {0};
    const lanes *end = (const lanes *)(data + num_bytes / STRIDE * STRIDE);
    for (const lanes *at = (const lanes *)data; at != end; at += 8) {
        a += at[0];
        b += at[1];
        c += at[2];
        d += at[3];
        e += at[4];
        f += at[5];
        g += at[6];
        h += at[7];
    }
    lanes total = ((a + b) + (c + d)) + ((e + f) + (g + h));
    uint64_t sum = 0;
    for (size_t i = 0; i < NUM_LANES; i++)
        sum += total[i];
    return sum;
}

/* Each thread writes, and later reads, one part, so that pages lie near the thread that reads them. */
static void part_of(size_t num_bytes, char **data, size_t *part)
{
    size_t share = num_bytes / STRIDE / (size_t)omp_get_num_threads() * STRIDE;
    *data += share * (size_t)omp_get_thread_num();
    *part = share;
}

void fill(char *data, size_t num_bytes, int num_threads)
{
#pragma omp parallel num_threads(num_threads)
    {
        char *own = data;
        size_t part;
        part_of(num_bytes, &own, &part);
        memset(own, 1, part);
    }
}

/* The seconds of `num_passes` passes over `num_bytes` bytes, a multiple of 512 per thread at an address of 64 bytes; the sum is
   stored, or the compiler could leave out the work. */
double read_passes(char *data, size_t num_bytes, int num_passes, int num_threads, uint64_t *sum)
{
    double started = 0, seconds = 0;
    uint64_t total = 0;
#pragma omp parallel num_threads(num_threads) reduction(+ : total)
    {
        char *own = data;
        size_t part;
        part_of(num_bytes, &own, &part);
#pragma omp barrier
#pragma omp master
        started = omp_get_wtime();
        for (int pass = 0; pass < num_passes; pass++) {
            total += sum_of(own, part);
            __asm__ volatile("" ::: "memory"); /* or one pass would do for all */
        }
#pragma omp barrier
#pragma omp master
        seconds = omp_get_wtime() - started;
    }
    *sum = total;
    return seconds;
}

int self_test(void)
{
    static lanes data[4096 / sizeof(lanes)];
    uint64_t sum;
    fill((char *)data, sizeof data, 2);
    read_passes((char *)data, sizeof data, 3, 2, &sum);
    return sum != 3 * (sizeof data / 8) * UINT64_C(0x0101010101010101);
}
