/* Repeats recorded calls: see replay.py. */
#include <stdint.h>

typedef struct {
    int (*function)(const void *);
    const void *arguments;
} Call;

/* The number of the first call that fails, or -1. */
int64_t replay(const Call *calls, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (calls[i].function(calls[i].arguments)) return i;
    return -1;
}
