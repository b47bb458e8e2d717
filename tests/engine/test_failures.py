"""What breaks in a step, a plugin, a hook or a sink costs the requests that took part, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, LLMEngine, SamplingParams
from dovetail.contracts.errors import GenerationError, PluginError, RequestError, WorkerError
from dovetail.contracts.outputs import RequestOutput
from dovetail.contracts.step import StepPlan
from dovetail.testing.local_plugins import write_distribution

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

PICKY_PROCESSOR = """
from dovetail.contracts.logits import LogitsProcessor

class Picky(LogitsProcessor):
    contract = (1, 0)

    def add_request(self, request):
        if request.options == "at once":
            raise RuntimeError("refuses to start")
        return request.options is not None

    def apply(self, logits, rows):
        if any(len(row.output_token_ids) == 2 for row in rows):
            raise RuntimeError("no third token")
"""

PICKY_BACKEND = """
from dovetail.attention_backends.sdpa import SDPABackend

class Picky(SDPABackend):
    steps = 0

    def forward(self, layer, query, key, value, kv_cache):
        if layer.layer_id == 1 and query.shape[0] == 13:
            raise ArithmeticError("thirteen tokens")
        return super().forward(layer, query, key, value, kv_cache)
"""

DYING_BACKEND = """
from dovetail.attention_backends.sdpa import SDPABackend
from dovetail.contracts.errors import WorkerError

class Dying(SDPABackend):
    def plan(self, batch):
        raise WorkerError("rank 0 is gone", rank=0)
"""

LAZY_SCHEDULER = """
from dovetail.contracts.scheduler import Schedule
from dovetail.schedulers.fcfs import FCFSScheduler

class Lazy(FCFSScheduler):
    def schedule(self, memory):
        return Schedule()
"""

RAISING_SINK = """
from dovetail.contracts.telemetry import TelemetrySink

class Raising(TelemetrySink):
    contract = (1, 0)
    calls = []

    def on_step(self, stats):
        Raising.calls.append("step")
        raise RuntimeError("disk full")

    def on_request(self, stats):
        Raising.calls.append("request")

    def close(self):
        Raising.calls.append("close")
        raise RuntimeError("cannot even close")
"""


@pytest.fixture
def write_plugin(tmp_path: Path) -> Callable[[str, str], str]:
    """Writes a local plugin and returns the reference that configs name it by."""

    def write(source: str, name: str) -> str:
        path = tmp_path / f"{name.lower()}.py"
        path.write_text(source)
        return f"{path}:{name}"

    return write


def run(engine: LLMEngine) -> dict[str, RequestOutput]:
    last = {}
    while engine.has_unfinished_requests():
        last.update({output.request_id: output for output in engine.step() if output.finished})
    return last


def test_a_logits_processor_that_raises_fails_its_requests(
    make_llm: Callable[..., LLM], hf_greedy: Callable[..., Any], write_plugin: Callable[[str, str], str]
) -> None:
    llm = make_llm(logits_processors={"picky": {"name": write_plugin(PICKY_PROCESSOR, "Picky")}})
    engine = llm.engine
    engine.add_request("plain", [5, 6], GREEDY)
    engine.add_request("picky", [7, 8], SamplingParams(temperature=0, max_tokens=6, processors={"picky": 1}))
    engine.add_request("early", [9], SamplingParams(temperature=0, max_tokens=6, processors={"picky": "at once"}))
    last = run(engine)
    assert last["plain"].outputs[0].token_ids == hf_greedy([5, 6], 6)
    assert last["plain"].error is None
    assert last["picky"].outputs[0].finish_reason == "error"
    assert last["picky"].outputs[0].token_ids == hf_greedy([7, 8], 2)
    assert last["picky"].error == "logits processor 'picky' failed: RuntimeError: no third token"
    assert "refuses to start" in (last["early"].error or "")
    with pytest.raises(GenerationError, match=r"1 of 2 requests failed; \d+: logits processor 'picky' failed") as e:
        llm.generate([[5], [6]], [SamplingParams(max_tokens=6, processors={"picky": 1}), GREEDY])
    failed, done = e.value.outputs
    assert "no third token" in (failed.error or "")
    assert done.outputs[0].token_ids == hf_greedy([6], 6)


MISUSING_PROCESSOR = """
import torch
from dovetail.contracts.logits import LogitsProcessor

class Misusing(LogitsProcessor):
    contract = (1, 0)

    def add_request(self, request):
        return request.options is not None

    def apply(self, logits, rows):
        match "HOW":
            case "returned a Tensor":
                return logits * 2
            case "the shape (0, 128)":
                logits.resize_(0, 128)
            case "the shape (1, 1)":
                logits.resize_(1, 1)
            case "the shape (128, 1)":
                logits.t_()
            case "torch.float64":
                logits.data = logits.double()
"""


@pytest.mark.parametrize(
    "how", ["returned a Tensor", "the shape (0, 128)", "the shape (1, 1)", "the shape (128, 1)", "torch.float64"]
)
def test_a_logits_processor_that_does_not_work_in_place_is_named(
    make_llm: Callable[..., LLM], hf_greedy: Callable[..., Any], write_plugin: Callable[[str, str], str], how: str
) -> None:
    source = MISUSING_PROCESSOR.replace("HOW", how)
    engine = make_llm(logits_processors={"it": {"name": write_plugin(source, "Misusing")}}).engine
    engine.add_request("plain", [5, 6], GREEDY)
    engine.add_request("processed", [7, 8], SamplingParams(temperature=0, max_tokens=6, processors={"it": 1}))
    last = run(engine)
    assert last["plain"].outputs[0].token_ids == hf_greedy([5, 6], 6)
    assert (last["processed"].error or "").startswith("logits processor 'it' failed: it ")
    assert how in (last["processed"].error or "")


def test_a_processor_of_another_name_is_refused(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(RequestError, match=r"no logits processor 'json' is configured \(configured: none\)"):
        make_llm().generate([5], SamplingParams(processors={"json": {}}))


def test_a_step_that_raises_fails_who_took_part(
    make_llm: Callable[..., LLM],
    hf_greedy: Callable[..., Any],
    write_plugin: Callable[[str, str], str],
    check_nothing_is_held: Callable[[LLMEngine], None],
) -> None:
    llm = make_llm(attention=write_plugin(PICKY_BACKEND, "Picky"), scheduler={"max_num_seqs": 4})
    engine = llm.engine
    engine.add_request("a", [5, 6], GREEDY)
    engine.add_request("b", [7, 8, 9, 10], SamplingParams(temperature=1e-6, max_tokens=6, n=2))
    engine.step()  # the prompts of a and b
    engine.add_request("bad", [9] * 10, GREEDY)  # 13 tokens, with one of a and of each completion of b
    engine.add_request("late", [11, 12], GREEDY)  # finds no place before they are gone
    last = run(engine)
    for request_id in ("a", "b", "bad"):
        assert last[request_id].error == "ArithmeticError: thirteen tokens"
        assert last[request_id].outputs[0].finish_reason == "error"
    assert last["late"].outputs[0].token_ids == hf_greedy([11, 12], 6)
    check_nothing_is_held(engine)
    # Nothing of the failed step is found in the prefix cache, and every place in the batch is free again.
    prompts = [[9] * 10, [5, 6], [7, 8, 9, 10], [9] * 9]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == [hf_greedy(prompt, 6) for prompt in prompts]


def test_a_worker_that_dies_ends_everything_loudly(
    make_llm: Callable[..., LLM], write_plugin: Callable[[str, str], str]
) -> None:
    llm = make_llm(attention=write_plugin(DYING_BACKEND, "Dying"))
    for _ in range(2):
        with pytest.raises(WorkerError, match="rank 0 is gone"):
            llm.generate([[5], [6]], GREEDY)
        assert llm.engine.request_ids == []
    assert len(make_llm().generate([5], GREEDY)) == 1


def test_a_scheduler_that_does_nothing_is_an_error_not_a_hang(
    make_llm: Callable[..., LLM], write_plugin: Callable[[str, str], str]
) -> None:
    llm = make_llm(scheduler={"name": write_plugin(LAZY_SCHEDULER, "Lazy")})
    with pytest.raises(PluginError, match="Lazy breaks the scheduler's contract: it schedules nothing"):
        llm.generate([[5], [6]], GREEDY)
    llm.engine.add_request("a", [5], GREEDY)
    with pytest.raises(PluginError):
        llm.engine.step()
    assert llm.engine.request_ids == []
    assert not llm.engine.has_unfinished_requests()


def test_a_sink_that_raises_is_switched_off(
    make_llm: Callable[..., LLM],
    write_plugin: Callable[[str, str], str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    file = tmp_path / "stats.jsonl"
    reference = write_plugin(RAISING_SINK, "Raising")
    llm = make_llm(telemetry=[{"name": reference}, {"name": "jsonl", "path": str(file)}])
    with caplog.at_level(logging.ERROR):
        llm.generate([[5], [6]], GREEDY)
        llm.shutdown()
    reports = [record.getMessage() for record in caplog.records]
    assert reports == ["telemetry sink Raising raised and is switched off"]
    assert len(file.read_text().splitlines()) == 2 + 6


HOOKS = """
from dovetail.contracts.hooks import hookimpl

heard = []

@hookimpl
def dovetail_engine_started(config, plugins):
    heard.append(("started", plugins["executor"]))

@hookimpl
def dovetail_weights_changed(version):
    heard.append(version)
    raise RuntimeError("a hook went wrong")

@hookimpl
def dovetail_engine_stopped():
    heard.append("stopped")
"""


def test_hooks_are_told_and_one_that_raises_is_reported_once(
    make_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    write_distribution(
        tmp_path,
        "listening",
        entry_points={"dovetail.hooks.v1": {"listening": "engine_hooks_that_listen"}},
        modules={"engine_hooks_that_listen.py": HOOKS},
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    llm = make_llm()
    import engine_hooks_that_listen  # type: ignore[import-not-found]

    llm.generate([[5, 6]], GREEDY, use_tqdm=False)
    for _ in range(2):
        llm.sleep(2)
        llm.wake_up(new_weights=True)
    llm.shutdown()
    assert engine_hooks_that_listen.heard == [("started", "dovetail.executors.cpu:CPUExecutor"), 1, 2, "stopped"]
    reports = [record.getMessage() for record in caplog.records if "a hook went wrong" in record.getMessage()]
    assert len(reports) == 1


def test_nothing_runs_on_when_a_late_part_cannot_be_made(
    make_llm: Callable[..., LLM], write_plugin: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dovetail.executors.cpu import CPUExecutor

    stopped = []
    shutdown = CPUExecutor.shutdown
    monkeypatch.setattr(CPUExecutor, "shutdown", lambda self: (stopped.append(1), shutdown(self))[1])
    source = RAISING_SINK.replace("calls = []", "def __init__(self, options):\n        raise OSError('no port')\n")
    with pytest.raises(Exception, match="no port"):
        make_llm(telemetry=[{"name": write_plugin(source, "Raising")}])
    assert stopped


LONG_PROMPT = [3 + 7 * i % 120 for i in range(100)]


@pytest.mark.parametrize("error", [RuntimeError("lost"), KeyboardInterrupt()])
def test_pages_that_a_failed_step_was_to_bring_back_reach_nobody(
    make_llm: Callable[..., LLM],
    hf_greedy: Callable[..., Any],
    check_nothing_is_held: Callable[[LLMEngine], None],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    llm = make_llm(
        cache={"num_blocks": 66, "swap_gib": 0.01, "prefix_caching": False},
        scheduler={"name": "priority", "max_num_batched_tokens": 16, "max_num_seqs": 1},
    )
    engine = llm.engine
    params = SamplingParams(temperature=1e-6, max_tokens=6, n=2)
    engine.add_request("low", LONG_PROMPT, params, priority=5)
    for _ in range(3):
        engine.step()  # a part of the prompt, which gives way
    engine.add_request("high", LONG_PROMPT[::-1] * 2, SamplingParams(temperature=0, max_tokens=2))
    execute, failed = engine.tokens._parts.executor.execute, []

    def fail_once(plan: StepPlan) -> Any:
        if plan.swap_in and not failed:
            failed.append(plan)
            raise error
        return execute(plan)

    monkeypatch.setattr(engine.tokens._parts.executor, "execute", fail_once)
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            run(engine)
        assert engine.request_ids == []
        assert engine.step() == []
    else:
        first, sibling = run(engine)["low"].outputs
        assert first.finish_reason == "error"
        assert sibling.token_ids == hf_greedy(LONG_PROMPT, 6)
    assert failed
    check_nothing_is_held(engine)
    assert llm.generate(LONG_PROMPT, params)[0].outputs[1].token_ids == hf_greedy(LONG_PROMPT, 6)


def test_pages_that_a_failed_step_was_to_swap_out_reach_nobody(
    make_llm: Callable[..., LLM],
    hf_greedy: Callable[..., Any],
    check_nothing_is_held: Callable[[LLMEngine], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = {"num_blocks": 66, "swap_gib": 0.01, "prefix_caching": False}
    engine = make_llm(cache=cache, scheduler={"name": "priority"}).engine
    failed = fail_once(engine, monkeypatch, lambda plan: bool(plan.swap_out))
    engine.add_request("low", LONG_PROMPT, GREEDY, priority=5)
    engine.step()
    engine.add_request("high", LONG_PROMPT[::-1] * 2, GREEDY)
    last = run(engine)
    assert [len(plan.seq_ids) for plan in failed] == [1], "the one that gave way took no part"
    assert "lost" in (last["high"].error or "")
    assert "lost" in (last["low"].error or "")
    check_nothing_is_held(engine)
    outputs = last["low"].outputs[0].token_ids
    assert outputs == hf_greedy(LONG_PROMPT, 6)[: len(outputs)]


LEISURELY_SCHEDULER = """
from dovetail.contracts.scheduler import RequestStatus
from dovetail.schedulers.priority import PriorityScheduler

class Leisurely(PriorityScheduler):
    known = ()

    def add(self, request):
        self.known += (request,)
        super().add(request)

    def schedule(self, memory):
        swapped = [request for request in self.known if request.status is RequestStatus.SWAPPED]
        schedule = super().schedule(memory)
        if len(schedule.requests) > 1:  # who comes back now computes something in the next step
            scheduled = [pair for pair in zip(schedule.requests, schedule.num_tokens) if pair[0] not in swapped]
            schedule.requests, schedule.num_tokens = map(list, zip(*scheduled))
        return schedule
"""


def test_pages_that_were_to_come_back_before_their_turn_reach_nobody(
    make_llm: Callable[..., LLM],
    hf_greedy: Callable[..., Any],
    write_plugin: Callable[[str, str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = {"num_blocks": 66, "swap_gib": 0.01, "prefix_caching": False}
    engine = make_llm(cache=cache, scheduler={"name": write_plugin(LEISURELY_SCHEDULER, "Leisurely")}).engine
    failed = fail_once(engine, monkeypatch, lambda plan: bool(plan.swap_in))
    engine.add_request("low", LONG_PROMPT, GREEDY, priority=5)
    engine.add_request("small", [5, 6], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    engine.step()
    engine.add_request("high", LONG_PROMPT[::-1] * 2, GREEDY)
    last = run(engine)
    assert [len(plan.seq_ids) for plan in failed] == [1], "the one that comes back took no part"
    assert last["high"].outputs[0].token_ids == hf_greedy(LONG_PROMPT[::-1] * 2, 6)
    assert "lost" in (last["small"].error or "")
    assert "lost" in (last["low"].error or "")


QUIET_SCHEDULER = """
from dovetail.schedulers.fcfs import FCFSScheduler

class Quiet(FCFSScheduler):
    def schedule(self, memory):
        schedule = super().schedule(memory)
        schedule.preempted = []
        return schedule
"""

EIGHT_PROMPTS = [[3 + (7 * i + 11 * k) % 120 for i in range(20)] for k in range(8)]
TIGHT = {"num_blocks": 66, "prefix_caching": False}


@pytest.mark.parametrize("swap_gib", [0, 0.01])
def test_tokens_do_not_depend_on_a_scheduler_that_says_who_gave_way(
    make_llm: Callable[..., LLM],
    hf_greedy: Callable[..., Any],
    write_plugin: Callable[[str, str], str],
    swap_gib: float,
) -> None:
    llm = make_llm(cache=TIGHT | {"swap_gib": swap_gib}, scheduler={"name": write_plugin(QUIET_SCHEDULER, "Quiet")})
    outputs = llm.generate(EIGHT_PROMPTS, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    for prompt, output in zip(EIGHT_PROMPTS, outputs, strict=True):
        assert output.outputs[0].token_ids == hf_greedy(prompt, 40)


LOGGING_DRAFTER = """
from pathlib import Path
from dovetail.contracts.speculation import Draft, DraftWorker

LOG = Path(__file__).with_suffix(".log")

class Logging(DraftWorker):
    contract = (1, 0)

    def propose(self, batch):
        with LOG.open("a") as file:
            file.writelines(f"proposes {request.seq_id}\\n" for request in batch.requests)
        return [Draft([1, 2, 3][: request.max_drafts]) for request in batch.requests]

    def on_finished(self, seq_id, token_ids):
        with LOG.open("a") as file:
            file.write(f"finished {seq_id}\\n")
"""


def make_drafting(make_llm: Callable[..., LLM], reference: str) -> LLM:
    drafters = {"mine": {"name": reference, "num_tokens": 3}}
    return make_llm(cache=TIGHT, speculative={"drafters": drafters, "default": "mine"})


def test_a_drafter_hears_of_requests_that_end_while_they_are_preempted(
    make_llm: Callable[..., LLM], write_plugin: Callable[[str, str], str], tmp_path: Path
) -> None:
    engine = make_drafting(make_llm, write_plugin(LOGGING_DRAFTER, "Logging")).engine
    for index, prompt in enumerate(EIGHT_PROMPTS):
        engine.add_request(str(index), prompt, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    while engine.core.num_running < len(EIGHT_PROMPTS):
        engine.step()
    while not engine.core.num_waiting:
        engine.step()  # until somebody gives way
    engine.abort_request(engine.request_ids)
    engine.add_request("last", [5, 6], GREEDY)
    run(engine)
    log = set((tmp_path / "logging.log").read_text().splitlines())
    drafted = {line.split()[1] for line in log if line.startswith("proposes")}
    finished = {line.split()[1] for line in log if line.startswith("finished")}
    assert len(drafted) == 9
    assert len(drafted - finished) == 1  # the last, whose end goes out with the next step


def test_a_drafter_that_raised_does_not_come_back_after_a_preemption(
    make_llm: Callable[..., LLM], write_plugin: Callable[[str, str], str], tmp_path: Path
) -> None:
    source = LOGGING_DRAFTER.replace("return [Draft", "raise RuntimeError('no idea')\n        return [Draft")
    llm = make_drafting(make_llm, write_plugin(source, "Logging"))
    outputs = llm.generate(EIGHT_PROMPTS, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert all("no idea" in (output.metrics.drafter_error or "") for output in outputs)
    calls = (tmp_path / "logging.log").read_text().splitlines()
    assert len(calls) == len(set(calls))


def fail_once(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, which: Callable[[StepPlan], bool]) -> list[StepPlan]:
    """The first plan that `which` names fails before a worker sees it; it is in the list then."""
    execute, failed = engine.tokens._parts.executor.execute, []

    def fail(plan: StepPlan) -> Any:
        if not failed and which(plan):
            failed.append(plan)
            raise RuntimeError("lost")
        return execute(plan)

    monkeypatch.setattr(engine.tokens._parts.executor, "execute", fail)
    return failed


def test_workers_hear_of_ends_that_a_failed_step_was_to_tell(
    make_llm: Callable[..., LLM], hf_greedy: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(scheduler={"max_num_seqs": 1})
    llm.generate([5, 6], GREEDY)
    failed = fail_once(llm.engine, monkeypatch, lambda plan: bool(plan.finished))
    with pytest.raises(GenerationError, match="lost"):
        llm.generate([7, 8], GREEDY)
    assert failed
    assert llm.generate([9, 10], GREEDY)[0].outputs[0].token_ids == hf_greedy([9, 10], 6)


def test_workers_hear_of_preemptions_that_a_failed_step_was_to_tell(
    make_llm: Callable[..., LLM], hf_greedy: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_llm(scheduler={"name": "priority", "max_num_seqs": 1}).engine
    failed = fail_once(engine, monkeypatch, lambda plan: bool(plan.preempted))
    engine.add_request("low", [5, 6], GREEDY, priority=1)
    engine.step()
    engine.add_request("high", [7, 8], GREEDY)
    last = run(engine)
    assert failed
    assert "lost" in (last["high"].error or "")
    assert last["low"].outputs[0].token_ids == hf_greedy([5, 6], 6)


LEAVES_OUT_SCHEDULER = """
from dovetail.schedulers.fcfs import FCFSScheduler

class LeavesOut(FCFSScheduler):
    left_out = False

    def schedule(self, memory):
        schedule = super().schedule(memory)
        if not self.left_out and len(schedule.requests) == 3 and schedule.requests[2].num_computed_tokens == 12:
            self.left_out = True  # they keep the blocks that they were granted
            del schedule.requests[1:], schedule.num_tokens[1:]
        return schedule
"""


LEFT_OUT = {"a": [5, 6, 7], "b": [9, 10, 11], "c": [12, 13, 14]}


def tells_of_absent_blocks(plan: StepPlan) -> bool:
    """Of requests that took blocks and were left out of the step, as a scheduler may leave them out."""
    return any(change[0] not in plan.seq_ids for change in plan.new_blocks)


def test_workers_hear_of_blocks_that_a_failed_step_was_to_tell(
    make_llm: Callable[..., LLM],
    hf_greedy: Callable[..., Any],
    write_plugin: Callable[[str, str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_llm(scheduler={"name": write_plugin(LEAVES_OUT_SCHEDULER, "LeavesOut")}).engine
    failed = fail_once(engine, monkeypatch, tells_of_absent_blocks)
    for request_id, prompt in LEFT_OUT.items():
        engine.add_request(request_id, prompt, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    last = run(engine)
    assert failed
    assert "lost" in (last["a"].error or "")
    for request_id in ("b", "c"):
        assert last[request_id].outputs[0].token_ids == hf_greedy(LEFT_OUT[request_id], 24)


def test_a_step_behind_one_that_was_to_tell_of_blocks_fails_with_it(
    make_llm: Callable[..., LLM],
    hf_greedy: Callable[..., Any],
    write_plugin: Callable[[str, str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It wrote where no block of its requests is."""
    scheduler = {"name": write_plugin(LEAVES_OUT_SCHEDULER, "LeavesOut")}
    engine = make_llm(scheduler=scheduler, executor={"name": "gpu", "device": "null"}).engine
    execute = engine.tokens._parts.executor.execute
    lost: Future[Any] = Future()

    def lose_once(plan: StepPlan) -> Future[Any]:
        if not lost.running() and tells_of_absent_blocks(plan):
            lost.set_running_or_notify_cancel()
            return lost
        if lost.running():  # the step behind it is in flight
            lost.set_exception(RuntimeError("lost"))
        return execute(plan)

    monkeypatch.setattr(engine.tokens._parts.executor, "execute", lose_once)
    for request_id, prompt in LEFT_OUT.items():
        engine.add_request(request_id, prompt, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    last = run(engine)
    assert lost.done()
    for request_id, output in last.items():
        assert "lost" in (output.error or "")
        tokens = output.outputs[0].token_ids
        assert tokens == hf_greedy(LEFT_OUT[request_id], 24)[: len(tokens)]


def test_an_interrupted_wait_leaves_no_step_behind(
    make_llm: Callable[..., LLM],
    hf_greedy: Callable[..., Any],
    check_nothing_is_held: Callable[[LLMEngine], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = make_llm(scheduler={"max_num_seqs": 1})
    engine = llm.engine
    llm.generate([5, 6], GREEDY)  # the workers hear of its end with the next plan
    engine.add_request("a", [7, 8], GREEDY)
    interrupted: Future[Any] = Future()
    interrupted.set_exception(KeyboardInterrupt())
    with monkeypatch.context() as patch:
        patch.setattr(engine.tokens._parts.executor, "execute", lambda plan: interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    check_nothing_is_held(engine)
    assert llm.generate([9, 10], GREEDY)[0].outputs[0].token_ids == hf_greedy([9, 10], 6)


def test_bad_words_are_forgotten_with_a_request_that_failed(
    make_text_llm: Callable[..., LLM],
    check_nothing_is_held: Callable[[LLMEngine], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_text_llm().engine
    fail_once(engine, monkeypatch, lambda plan: len(plan.seq_ids) == 2)
    for request_id in ("a", "b"):
        engine.add_request(request_id, "some words", SamplingParams(max_tokens=4, bad_words=["er"]))
    assert all("lost" in (output.error or "") for output in run(engine).values())
    check_nothing_is_held(engine)


def test_bad_words_outlive_a_preemption(make_text_llm: Callable[..., LLM]) -> None:
    llm = make_text_llm(scheduler={"name": "priority", "max_num_seqs": 1})
    engine, params = llm.engine, SamplingParams(temperature=0, max_tokens=8)
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    words = [tokenizer.decode([token]) for token in llm.generate("some words", params)[0].outputs[0].token_ids]
    params = replace(params, bad_words=[word for word in words if word.strip()])
    expected = llm.generate("some words", params)[0].outputs[0]
    engine.add_request("low", "some words", params, priority=1)
    engine.step()
    engine.add_request("high", [7, 8], SamplingParams(temperature=0, max_tokens=2))
    last = run(engine)
    assert last["low"].metrics.num_preemptions == 1
    assert last["low"].outputs[0].token_ids == expected.token_ids
