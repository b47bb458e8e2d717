"""Conformance suite of poolers. A third party's test is a subclass::

    from dovetail.testing import PoolerSuite

    class TestMyPooler(PoolerSuite):
        plugin = MyPooler

How the steps of an engine cut a prompt, and who else is in them, must not be seen in a result. So the oracle is the
pooler itself: a new one that is given the whole prompt at once.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, ClassVar

import pytest
import torch

from dovetail.contracts.plugin import Environment
from dovetail.contracts.pooling import Pooler, PoolerNeed, PoolerSetup, PoolingState
from dovetail.contracts.pooling_params import LABEL_TASKS, TASKS, TOKEN_CLASSIFY, TOKEN_EMBED
from dovetail.testing.suite import PluginSuite

_TOLERANCE = 2e-5
_CUTS = ((1,) * 40, (7,) * 5 + (5,), (39, 1), (1, 39), (3, 30, 7))


class PoolerSuite(PluginSuite):
    """Tests of every pooler; each is run for all tasks that it declares."""

    kind: ClassVar[str] = "pooler"
    plugin: ClassVar[type[Pooler]]
    options: ClassVar[Mapping[str, Any]] = {}
    """Options of the pooler in the config."""
    hidden_size: ClassVar[int] = 16
    num_labels: ClassVar[int] = 3
    """Labels of the score head that poolers of the tasks with labels are given."""

    @property
    def tasks(self) -> list[str]:
        """Those that the pooler declares, in order."""
        return [task for task in TASKS if task in self.plugin.capabilities.tasks]

    def create(self, task: str) -> Pooler:
        """A pooler as the host creates it."""
        labels = self.num_labels if task in LABEL_TASKS else 0
        need = PoolerNeed(task=task, hidden_size=self.hidden_size, num_labels=labels)
        setup = PoolerSetup(need=need, score=self._head() if labels else None)
        return self.plugin(self.plugin.Options.model_validate(dict(self.options)), setup)

    def test_declares_its_tasks(self) -> None:
        """At least one, of those that there are."""
        assert self.tasks, "capabilities.tasks is empty, so the host never asks the pooler"
        assert self.plugin.capabilities.tasks <= set(TASKS)

    def test_results_have_the_shape_of_the_task(self) -> None:
        """One vector, or one for each token, of floating point numbers."""
        for task in self.tasks:
            width = self.num_labels if task in LABEL_TASKS else self.hidden_size
            for num_tokens in (2, 40):
                result = self._whole(task, self._states(num_tokens))
                rows = (num_tokens,) if task in (TOKEN_EMBED, TOKEN_CLASSIFY) else ()
                assert result.shape == (*rows, width), f"{task}, a prompt of {num_tokens} tokens"
                assert result.is_floating_point()

    def test_results_follow_from_the_states(self) -> None:
        """Other states give another result, or the suite would test nothing."""
        for task in self.tasks:
            assert not torch.equal(self._whole(task, self._states(40)), self._whole(task, self._states(40, seed=9)))

    def test_a_prompt_may_have_one_token(self) -> None:
        """Its result is finite."""
        for task in self.tasks:
            assert self._whole(task, self._states(1)).isfinite().all()

    def test_chunks_do_not_matter(self) -> None:
        """The step loop cuts a prompt as it has to."""
        states = self._states(40)
        for task in self.tasks:
            expected = self._whole(task, states)
            for cut in _CUTS:
                self._compare(self._in_chunks(self.create(task), states, cut), expected, f"{task} in chunks of {cut}")

    def test_the_same_states_give_the_same_result(self) -> None:
        """To the bit: a request may be repeated."""
        states = self._states(40)
        for task in self.tasks:
            assert torch.equal(self._whole(task, states), self._whole(task, states))

    def test_memory_of_the_states_is_the_host_s(self) -> None:
        """It is overwritten after each call."""
        states = self._states(40)
        for task in self.tasks:
            expected = self._whole(task, states)
            result = self._in_chunks(self.create(task), states, (7,) * 5 + (5,), spoil=True)
            self._compare(result, expected, f"{task}, states overwritten after add()")

    def test_states_are_not_written_to(self) -> None:
        """Others read them too: what is sampled for the requests of the same step."""
        for task in self.tasks:
            states = self._states(40)
            before = states.clone()
            self._whole(task, states)
            assert torch.equal(states, before), f"{task} changed the hidden states"

    def test_requests_are_apart(self) -> None:
        """Several are in the batch, and take turns in any order."""
        prompts = [self._states(length, seed=length) for length in (40, 3, 17, 40)]
        for task in self.tasks:
            expected = [self._whole(task, states) for states in prompts]
            for number, result in enumerate(self._taking_turns(self.create(task), prompts)):
                self._compare(result, expected[number], f"{task}, one of four requests")

    def test_a_preempted_request_starts_again(self) -> None:
        """The host drops the state, and begins with another one."""
        states = self._states(40)
        for task in self.tasks:
            pooler = self.create(task)
            pooler.start(40).add(states[:25].clone(), range(25))
            self._compare(self._in_chunks(pooler, states, (40,)), self._whole(task, states), f"{task}, preempted")

    def test_engines_are_apart(self) -> None:
        """A process may have several engines, each with a pooler of its own."""
        states, others = self._states(40), self._states(40, seed=5)
        for task in self.tasks:
            expected = self._whole(task, states)
            first, second = self.create(task).start(40), self.create(task).start(40)
            first.add(states[:20].clone(), range(20))
            second.add(others.clone(), range(40))
            first.add(states[20:].clone(), range(20, 40))
            self._compare(first.finish(), expected, f"{task}, two engines")

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_sums_are_taken_in_float32_or_better(self, dtype: torch.dtype) -> None:
        """Of states in a model's dtype: the result is as near as that of the same states in float32."""
        states = (self._states(2000) + 3).to(dtype)
        for task in self.tasks:
            expected = self._whole(task, states.float()).float()
            result = self._whole(task, states).float()
            torch.testing.assert_close(result, expected, rtol=2e-2 if task in LABEL_TASKS else 2e-3, atol=2e-3)

    def test_the_beginning_of_a_prompt_may_be_cached(self) -> None:
        """Where it says so, the states of the last token suffice."""
        self.require("skips_prefix")
        states = self._states(40)
        for task in self.tasks:
            expected = self._whole(task, states)
            for start in (0, 16, 39):
                state = self.create(task).start(40)
                state.add(states[start:].clone(), range(start, 40))
                self._compare(state.finish(), expected, f"{task} from position {start} on")

    def test_needs_labels_for_scores(self) -> None:
        """Where the checkpoint has no score head, `check` says so for the tasks with labels."""
        labels = [task for task in self.tasks if task in LABEL_TASKS]
        if not labels:
            pytest.skip(f"{self.plugin.__name__} serves no task with labels")
        options = self.plugin.Options.model_validate(dict(self.options))
        for task in labels:
            need = PoolerNeed(task=task, hidden_size=self.hidden_size)
            assert self.plugin.check(need, options, Environment("cpu", 1, 1 << 30)), f"{task} without labels"

    def test_forgets_what_has_ended(self) -> None:
        """Requests come and go for months."""
        for task in self.tasks:
            pooler, sizes = self.create(task), []
            for turn in range(4):
                for seed in range(8):
                    self._in_chunks(pooler, self._states(5, seed=8 * turn + seed), (3, 2))
                gc.collect()
                sizes.append(_num_objects(pooler))
            assert sizes[-1] <= sizes[1], f"objects that the pooler holds after 8, 16, ... requests: {sizes}"

    def _states(self, num_tokens: int, seed: int = 0) -> torch.Tensor:
        """float32 [num_tokens, hidden_size]"""
        return torch.randn(num_tokens, self.hidden_size, generator=torch.Generator().manual_seed(seed))

    def _head(self) -> Callable[[torch.Tensor], torch.Tensor]:
        weight = torch.randn(self.num_labels, self.hidden_size, generator=torch.Generator().manual_seed(77))
        return lambda states: states.float() @ weight.T

    def _whole(self, task: str, states: torch.Tensor) -> torch.Tensor:
        """What a new pooler makes of a prompt at once."""
        state = self.create(task).start(len(states))
        state.add(states, range(len(states)))
        return state.finish()

    def _in_chunks(
        self, pooler: Pooler, states: torch.Tensor, cut: Sequence[int], *, spoil: bool = False
    ) -> torch.Tensor:
        state, start = pooler.start(len(states)), 0
        for size in cut:
            chunk = states[start : start + size].clone()
            state.add(chunk, range(start, start + size))
            if spoil:
                chunk.fill_(1e6)
            start += size
        return state.finish()

    def _taking_turns(self, pooler: Pooler, prompts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results of prompts of which a step computes some tokens of one each."""
        chooser = random.Random(1)
        states: list[PoolingState] = [pooler.start(len(prompt)) for prompt in prompts]
        done = [0] * len(prompts)
        while any(count < len(prompt) for count, prompt in zip(done, prompts, strict=True)):
            number = chooser.choice([n for n, prompt in enumerate(prompts) if done[n] < len(prompt)])
            stop = min(done[number] + chooser.randint(1, 9), len(prompts[number]))
            states[number].add(prompts[number][done[number] : stop].clone(), range(done[number], stop))
            done[number] = stop
        return [state.finish() for state in states]

    def _compare(self, found: torch.Tensor, expected: torch.Tensor, case: str) -> None:
        assert found.shape == expected.shape, f"{case}: shape {tuple(found.shape)}, not {tuple(expected.shape)}"
        difference = (found.float() - expected.float()).abs().max().item()
        assert difference <= _TOLERANCE, f"{case}: the result differs by {difference}"


def _num_objects(root: object) -> int:
    """Objects that `root` reaches, but for what belongs to the program: classes, modules, functions."""
    seen, waiting = {id(root)}, [root]
    while waiting:
        for found in gc.get_referents(waiting.pop()):
            if id(found) not in seen and not isinstance(found, type | ModuleType | FunctionType):
                seen.add(id(found))
                waiting.append(found)
    return len(seen)
