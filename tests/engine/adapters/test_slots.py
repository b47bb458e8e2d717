"""Adapters share a few slots: each request waits until its adapter has one, and gets the tokens that it gets alone."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from typing import Any

import pytest

from dovetail import LLM, LLMEngine, LoRARequest, RequestOutput, SamplingParams
from dovetail.contracts.errors import RequestError
from dovetail.contracts.scheduler import RequestStatus
from dovetail.contracts.step import StepPlan
from dovetail.engine.adapters import slots as slots_module
from dovetail.engine.adapters.adapter import Adapter
from dovetail.engine.adapters.slots import AdapterSlots
from dovetail.engine.sequence import Sequence
from dovetail.executors.cpu import CPUExecutor

MakeLLM = Callable[..., LLM]
MakeAdapter = Callable[..., LoRARequest]
PROMPT = [3 + 7 * i % 120 for i in range(14)]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Every plan that the executor `cpu` is given from now on."""
    given: list[StepPlan] = []
    execute = CPUExecutor.execute

    def watched(self: CPUExecutor, plan: StepPlan) -> Any:
        given.append(plan)
        return execute(self, plan)

    monkeypatch.setattr(CPUExecutor, "execute", watched)
    return given


def placed(plans: list[StepPlan]) -> list[str]:
    return [placement.name for plan in plans for placement in plan.adapters]


def run(engine: LLMEngine) -> dict[str, RequestOutput]:
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
    return outputs


def add(engine: LLMEngine, name: str, lora: LoRARequest, prompt: list[int] = PROMPT) -> None:
    engine.add_lora(lora)
    engine.add_request(name, prompt, GREEDY, lora_request=lora)


def test_65_adapters_over_4_slots_give_each_request_the_tokens_that_it_gets_alone(
    make_llm: MakeLLM, make_adapter: MakeAdapter, plans: list[StepPlan]
) -> None:
    adapters = [make_adapter(f"a{index}", index, rank=1 + index % 3, targets=("q_proj",)) for index in range(65)]
    few = make_llm(lora={"enabled": True, "max_loras": 4, "max_rank": 4, "max_cpu_loras": 8})
    many = make_llm(lora={"enabled": True, "max_loras": 65, "max_rank": 4})
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def tokens(llm: LLM, loras: list[LoRARequest]) -> list[list[int]]:
        outputs = llm.generate([PROMPT] * len(loras), params, use_tqdm=False, lora_request=loras)
        return [output.outputs[0].token_ids for output in outputs]

    found = tokens(few, adapters)
    assert max(len({placement.slot for placement in plan.adapters}) for plan in plans) == 4
    assert sorted(placed(plans)) == sorted(lora.lora_name for lora in adapters)  # each was brought to a slot once
    assert found == [tokens(many, [lora])[0] for lora in adapters]
    assert len({tuple(each) for each in found}) > 20


def test_an_adapter_whose_request_runs_keeps_its_slot(
    make_llm: MakeLLM, make_adapter: MakeAdapter, plans: list[StepPlan]
) -> None:
    engine = make_llm(lora={"enabled": True}).engine
    first, second = make_adapter("first", 1), make_adapter("second", 2)
    for index, lora in enumerate((first, second, first)):
        add(engine, str(index), lora, PROMPT[index:])
    engine.step()
    assert [plan.seq_ids for plan in plans] == [[1, 3]]
    run(engine)
    assert placed(plans) == ["first", "second"]


def test_of_idle_adapters_the_one_used_longest_ago_makes_room(
    make_llm: MakeLLM, make_adapter: MakeAdapter, plans: list[StepPlan]
) -> None:
    engine = make_llm(lora={"enabled": True, "max_loras": 2}).engine
    a, b, c = (make_adapter(name, seed) for seed, name in enumerate("abc", 1))
    for index, lora in enumerate((a, b, a, c, a, b)):
        add(engine, str(index), lora)
        run(engine)
    assert placed(plans) == ["a", "b", "c", "b"]


def test_a_pinned_adapter_keeps_its_slot(make_llm: MakeLLM, make_adapter: MakeAdapter, plans: list[StepPlan]) -> None:
    engine = make_llm(lora={"enabled": True, "max_loras": 2}).engine
    a, b, c = (make_adapter(name, seed) for seed, name in enumerate("abc", 1))
    engine.add_lora(a)
    engine.pin_lora("a")
    for index, lora in enumerate((a, b, c, b, c, a)):
        add(engine, str(index), lora)
        run(engine)
    assert placed(plans) == ["a", "b", "c", "b", "c"]
    assert [each.is_pinned for each in engine.list_loras()] == [True, False, False]
    with pytest.raises(RequestError, match=r"lora\.max_loras is 2, 1 adapters are pinned, and one slot must be left"):
        engine.pin_lora("b")
    engine.remove_lora("a")
    engine.pin_lora("b")


def test_a_held_request_gives_its_slot_to_others(make_llm: MakeLLM, make_adapter: MakeAdapter) -> None:
    engine = make_llm(lora={"enabled": True}).engine
    first, second = make_adapter("first", 1), make_adapter("second", 2)
    add(engine, "held", first)
    engine.step()
    engine.hold("held")
    add(engine, "other", second)
    ended = {}
    while engine.is_runnable:
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    assert ended.keys() == {"other"}
    engine.resume("held")
    ended |= run(engine)
    alone = make_llm(lora={"enabled": True})
    for name, lora in (("held", first), ("other", second)):
        [output] = alone.generate([PROMPT], GREEDY, use_tqdm=False, lora_request=lora)
        assert ended[name].outputs[0].token_ids == output.outputs[0].token_ids


def test_requests_that_come_later_do_not_starve_one_that_waits_for_a_slot(
    make_llm: MakeLLM, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots_module, "PATIENCE", 4)
    engine = make_llm(lora={"enabled": True}).engine
    first, second = make_adapter("first", 1), make_adapter("second", 2)
    add(engine, "0", first)
    add(engine, "waits", second)
    ended: list[str] = []
    for index in range(1, 40):
        add(engine, str(index), first)
        ended += [output.request_id for output in engine.step() if output.finished]
        if "waits" in ended:
            break
    assert "waits" in ended
    run(engine)


def test_nobody_is_preempted_for_a_request_whose_adapter_gets_no_slot(
    make_llm: MakeLLM, make_adapter: MakeAdapter
) -> None:
    engine = make_llm(lora={"enabled": True}, scheduler={"name": "priority", "max_num_seqs": 2}).engine
    first, second = make_adapter("first", 1), make_adapter("second", 2)
    for lora in (first, second):
        engine.add_lora(lora)
    for index, lora in enumerate((first, None)):
        engine.add_request(f"low {index}", PROMPT[index:], GREEDY, lora_request=lora, priority=9)
    engine.step()
    engine.add_request("high", PROMPT[2:], GREEDY, lora_request=second, priority=0)
    found = run(engine)
    assert {name: output.metrics.num_preemptions for name, output in found.items()} == dict.fromkeys(found, 0)
    assert found.keys() == {"low 0", "low 1", "high"}


def test_a_step_that_cannot_bring_an_adapter_to_its_slot_fails_its_requests_alone(
    make_llm: MakeLLM, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are changed between the engine's look at them and the worker's."""
    engine = make_llm(lora={"enabled": True}).engine
    lora = make_adapter("pirate", 1)
    engine.add_lora(lora)
    make_adapter("pirate", 2)
    monkeypatch.setattr(Adapter, "is_unchanged", True)
    engine.add_request("lost", PROMPT, GREEDY, lora_request=lora)
    assert "the files of adapter 'pirate' in" in str(run(engine)["lost"].error)
    monkeypatch.undo()
    engine.remove_lora("pirate")
    add(engine, "again", lora)
    engine.add_request("plain", PROMPT, GREEDY)
    assert [output.error for output in run(engine).values()] == [None, None]


def test_any_folder_of_equal_content_is_read(
    make_llm: MakeLLM, make_adapter: MakeAdapter, plans: list[StepPlan]
) -> None:
    engine = make_llm(lora={"enabled": True}).engine
    first, twin, other = make_adapter("first", 1), make_adapter("twin", 1), make_adapter("other", 2)
    for lora in (first, twin, other):
        engine.add_lora(lora)
    shutil.rmtree(first.lora_path)
    for index, lora in enumerate((first, twin)):
        engine.add_request(lora.lora_name, PROMPT[index:], GREEDY, lora_request=LoRARequest(lora.lora_name))
    assert [output.error for output in run(engine).values()] == [None, None]
    assert placed(plans) == ["twin"]
    add(engine, "other", other)  # takes the one slot
    run(engine)
    shutil.rmtree(twin.lora_path)
    for lora in (first, twin):
        engine.add_request(lora.lora_name, PROMPT, GREEDY, lora_request=LoRARequest(lora.lora_name))
    for name, output in run(engine).items():
        assert f"the files of adapter {name!r} in" in str(output.error)


def test_siblings_and_beams_have_the_adapter_of_their_request(
    make_llm: MakeLLM, make_adapter: MakeAdapter, make_merged: Callable[..., LLM]
) -> None:
    from dovetail import BeamSearchParams

    lora = make_adapter("pirate")
    llm, merged = make_llm(lora={"enabled": True}), make_merged(lora)
    params = SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=6, ignore_eos=True)
    [found] = llm.generate([PROMPT], params, use_tqdm=False, lora_request=lora)
    [expected] = merged.generate([PROMPT], params, use_tqdm=False)
    assert [each.token_ids for each in found.outputs] == [each.token_ids for each in expected.outputs]
    beams = BeamSearchParams(beam_width=2, max_tokens=4)
    [found_beams] = llm.beam_search([PROMPT], beams, use_tqdm=False, lora_request=lora)
    [expected_beams] = merged.beam_search([PROMPT], beams, use_tqdm=False)
    assert [each.tokens for each in found_beams.sequences] == [each.tokens for each in expected_beams.sequences]


def test_threads_load_and_use_adapters_at_once(make_llm: MakeLLM, make_adapter: MakeAdapter) -> None:
    llm = make_llm(lora={"enabled": True, "max_loras": 2})
    adapters = [make_adapter(f"a{index}", index) for index in range(6)]
    found: dict[str, list[int]] = {}

    def use(lora: LoRARequest) -> None:
        [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False, lora_request=lora)
        found[lora.lora_name] = output.outputs[0].token_ids

    threads = [threading.Thread(target=use, args=[lora]) for lora in adapters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outputs = llm.generate([PROMPT] * 6, GREEDY, use_tqdm=False, lora_request=adapters)
    assert {lora.lora_name: o.outputs[0].token_ids for lora, o in zip(adapters, outputs, strict=True)} == found


def sequence(adapter: Adapter, status: RequestStatus = RequestStatus.RUNNING) -> Sequence:
    made = Sequence(1, "a", [1, 2], GREEDY, adapter=adapter)
    made.status = status
    return made


def test_slots_forget_what_a_failed_step_should_have_placed() -> None:
    slots = AdapterSlots(1, lambda digest: ())
    adapter = Adapter("a", "/nowhere", "digest", 4, 1, ())
    object.__setattr__(adapter, "marks", None)  # as files that are gone are now
    slots.claim(sequence(adapter))
    told = slots.drain()
    assert [(each.slot, each.digest) for each in told] == [(0, "digest")]
    slots.withdraw(told)
    assert not slots.has("digest")
    slots.claim(sequence(adapter))
    assert slots.drain() == told
