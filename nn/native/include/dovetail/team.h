/* Loops whose turns several threads share: what kernels use that `dovetail.nn.native` compiles, in place of OpenMP.
 *
 * A turn is done by whichever thread comes first, and the loop is over when the last turn is: a thread that the system
 * does not let run holds up nothing but a turn that it has begun. So a turn writes where no other does, and what it
 * writes depends on its number alone.
 */

#ifndef DOVETAIL_TEAM_H
#define DOVETAIL_TEAM_H

#include <stdint.h>

/* Does one turn of the loop; `thread` is 0 .. threads - 1, another one in each of those that are at work. */
typedef void (*DovetailTurn)(const void *loop, int64_t turn, int32_t thread);

typedef struct {
    void (*share)(DovetailTurn do_turn, const void *loop, int64_t turns, int32_t threads);
} DovetailTeam;

static const DovetailTeam *dovetail_team;

/* Called once the library is loaded. */
void dovetail_join_team(const DovetailTeam *team) { dovetail_team = team; }

/* Does turns 0 .. turns - 1 in any order, on at most so many threads, and returns when all are done. On the calling thread
 * alone where nobody gave the library a team, as in a self-test, and where the team is at work for another caller. Not
 * from within a turn. */
static inline void dovetail_share(DovetailTurn do_turn, const void *loop, int64_t turns, int32_t threads) {
    if (dovetail_team && threads > 1 && turns > 1) {
        dovetail_team->share(do_turn, loop, turns, threads);
        return;
    }
    for (int64_t turn = 0; turn < turns; turn++) do_turn(loop, turn, 0);
}

#endif
