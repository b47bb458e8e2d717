"""Random requests for a `SchedulerSimulation`: they come, go, are held and aborted."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from dovetail.contracts.scheduler import Scheduler, SchedulerLimits
from dovetail.testing.granting import GrantRule, Multiples, Refusals, Spans, in_full
from dovetail.testing.scheduler_simulation import VOCAB_SIZE, SchedulerSimulation


def random_grants(limits: SchedulerLimits, rng: Random) -> GrantRule:
    """A rule that lets every request get done: what must not be cut fits into a step."""
    most = limits.max_num_batched_tokens
    if limits.long_prefill_token_threshold:
        most = min(most, limits.long_prefill_token_threshold)
    size = rng.randint(1, most)
    rules: list[GrantRule] = [in_full, in_full, Multiples(size), Spans(size, size + rng.randint(0, 3)), Refusals(3)]
    return rng.choice(rules)


def random_simulation(
    create_scheduler: Callable[[SchedulerLimits], Scheduler], rng: Random, *, num_host_blocks: int | None = None
) -> SchedulerSimulation:
    """A simulation with limits, memory and features drawn from `rng`: from ample to barely enough for one request."""
    limits = SchedulerLimits(
        max_num_batched_tokens=rng.choice([4, 7, 16, 64]),
        max_num_seqs=rng.choice([1, 2, 4, 8]),
        max_model_len=24,
        enable_chunked_prefill=rng.random() < 0.8,
        max_num_partial_prefills=rng.choice([1, 2]),
        max_long_partial_prefills=1,
        long_prefill_token_threshold=rng.choice([0, 0, 3]),
    )
    max_drafts = rng.choice([0, 0, 3])
    return SchedulerSimulation(
        create_scheduler(limits),
        limits,
        windows=rng.choice([(None,), (None,), (3,), (None, 4), (None, 2, 5)]),
        block_size=rng.choice([1, 2, 4]),
        num_blocks=rng.choice([13, 20, 40, 90]),
        num_host_blocks=rng.choice([0, 8, 64]) if num_host_blocks is None else num_host_blocks,
        prefix_caching=rng.random() < 0.7,
        max_drafts=max_drafts,
        max_in_flight=1 if max_drafts else rng.choice([1, 2]),
        grants=random_grants(limits, rng),
        rng=rng,
    )


def run_random_traffic(simulation: SchedulerSimulation, rng: Random, *, num_requests: int = 12) -> None:
    """Requests come, go, are held, resumed and aborted between steps, until all are done."""
    longest = simulation.longest_request()
    num_left = num_requests if longest >= 2 else 0
    while num_left or simulation.has_work:
        while num_left and (rng.random() < 0.4 or not simulation.has_work):
            num_left -= 1
            length = rng.randint(1, longest - 1)
            # Few tokens and prompts that begin alike make prefixes meet.
            prompt = [0] * (length // 2) + [rng.randrange(VOCAB_SIZE) for _ in range(length - length // 2)]
            num_forks = rng.choice([0, 0, 0, 1, 2])
            salt = rng.choice([b"", b"", b"salt"])
            num_output = rng.randint(1, longest - length)
            simulation.add(prompt, num_output, priority=rng.randint(0, 2), num_forks=num_forks, salt=salt)
        if rng.random() < 0.05:
            simulation.abort(rng.choice(simulation.live))
        for sequence in simulation.live:
            if rng.random() < (0.2 if sequence.is_held else 0.03):
                sequence.is_held = not sequence.is_held
        if simulation.has_work:
            simulation.step()
        assert simulation.num_steps < 10_000, "requests do not get done"
    simulation.run()
