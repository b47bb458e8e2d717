"""The engine over the null device: steps overlap, and the tokens are those of the `cpu` executor.

The orders "late" and "early" do the device's work as late, or as early, as the events allow, so that a wait that is
missing shows as a wrong token.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, LLMEngine, SamplingParams
from dovetail.config.load import load_config
from dovetail.contracts.device import Graph, Work
from dovetail.contracts.errors import CapacityError, ConfigError, ModelError, RequestError, WorkerError
from dovetail.engine.resolving import resolve
from dovetail.executors.gpu.executor import GPUExecutor
from dovetail.executors.gpu.host import HostDevice
from dovetail.nn.replay import Replay
from dovetail.testing.tiny_models import save_tiny_model, tiny_config
from dovetail.worker import loaded_model
from dovetail.worker.forward import GraphForward

ORDERS = ["at once", "late", "early"]
PROMPTS = [[5, 9, 33, 70, 12], [100, 4], list(range(3, 60)), [7] * 20, [1, 2, 3], list(range(40, 90))]


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    save_tiny_model(directory, tiny_config(request.param))
    return directory


def sections(directory: Path, executor: Any, **more: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(directory), "tokenizer_mode": "none", "dtype": "float32", "operators": None},
        "cache": {"block_size": 8, "num_blocks": 150},
        "attention": "reference",
        "executor": executor,
    } | more


def null(order: str = "at once", **more: Any) -> dict[str, Any]:
    return {"name": "gpu", "device": "null", "null_order": order, **more}


def tokens(directory: Path, executor: Any, params: list[SamplingParams], **more: Any) -> list[list[list[int]]]:
    with LLM(**sections(directory, executor, **more)) as llm:
        outputs = llm.generate(PROMPTS[: len(params)], params)
    return [[list(completion.token_ids) for completion in output.outputs] for output in outputs]


def mixed(**more: Any) -> list[SamplingParams]:
    """Greedy and sampled, short and long, with and without truncation, all without host-side looks at logits."""
    return [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, **more),
        SamplingParams(temperature=0.9, seed=1, max_tokens=17, ignore_eos=True, **more),
        SamplingParams(temperature=0.7, top_p=0.8, seed=2, max_tokens=5, ignore_eos=True, **more),
        SamplingParams(temperature=1.1, top_k=9, seed=3, max_tokens=20, ignore_eos=True, **more),
        SamplingParams(temperature=0, max_tokens=1, **more),
        SamplingParams(temperature=0.8, min_p=0.05, seed=4, max_tokens=9, **more),
    ]


@pytest.mark.parametrize("order", ORDERS)
def test_tokens_are_those_of_the_cpu_executor(model: Path, order: str) -> None:
    assert tokens(model, null(order), mixed()) == tokens(model, "cpu", mixed())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("swap_gib", [0.0, 0.01])
def test_with_chunks_and_little_memory(model: Path, order: str, swap_gib: float) -> None:
    """Prompts in parts, preemption by recomputing and by swapping, while steps are under way."""
    little = {
        "cache": {"block_size": 4, "num_blocks": 45 if "gemma" in str(model) else 26, "swap_gib": swap_gib},
        "model": {
            "path": str(model),
            "tokenizer_mode": "none",
            "dtype": "float32",
            "operators": None,
            "max_model_len": 80,
        },
        "scheduler": {"max_num_batched_tokens": 24, "max_num_seqs": 5},
    }
    params = [*mixed(), *mixed()][: len(PROMPTS)]
    assert tokens(model, null(order), params, **little) == tokens(model, "cpu", params, **little)


@pytest.mark.parametrize("order", ORDERS)
def test_beside_requests_that_the_host_has_to_look_at(model: Path, order: str) -> None:
    """Penalties, log probabilities, masks and several completions mix with requests that need nothing."""
    params = mixed()
    params[1] = SamplingParams(temperature=0.9, seed=1, max_tokens=7, repetition_penalty=1.3, ignore_eos=True)
    params[2] = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    params[3] = SamplingParams(temperature=1.0, n=3, seed=5, max_tokens=8, ignore_eos=True)
    params[4] = SamplingParams(temperature=0, max_tokens=10, stop_token_ids=[3, 5, 8], min_tokens=3)
    assert tokens(model, null(order), params) == tokens(model, "cpu", params)


@pytest.mark.parametrize("order", ORDERS)
def test_speculation(model: Path, order: str) -> None:
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)] * 3
    plain = tokens(model, "cpu", params)
    assert tokens(model, null(order), params, speculative={"drafters": {"ngram": {"name": "ngram"}}}) == plain


def test_two_steps_are_under_way(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next plan is handed over before the tokens of the last one are asked for, and the host waits once a step."""
    handed_over: list[int] = []
    execute = GPUExecutor.execute

    def watched(self: GPUExecutor, plan: Any) -> Any:
        future = execute(self, plan)
        handed_over.append(plan.step_id)
        return future

    monkeypatch.setattr(GPUExecutor, "execute", watched)
    with LLMEngine.from_config(sections(model, null("late"))) as engine:
        engine.add_request("a", PROMPTS[0], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        ahead = []
        steps = 0
        while engine.has_unfinished_requests():
            engine.step()
            steps += 1
            ahead.append(len(handed_over) - steps)
        assert ahead[:5] == [1] * 5
        assert ahead[-1] == 0


def test_what_the_host_has_to_see_is_not_run_ahead_of(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with a penalty gets each token with its own step."""
    handed_over: list[int] = []
    execute = GPUExecutor.execute

    def watched(self: GPUExecutor, plan: Any) -> Any:
        handed_over.append(plan.step_id)
        return execute(self, plan)

    monkeypatch.setattr(GPUExecutor, "execute", watched)
    with LLMEngine.from_config(sections(model, null("late"))) as engine:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, presence_penalty=0.5)
        engine.add_request("a", PROMPTS[0], params)
        steps = 0
        while engine.has_unfinished_requests():
            engine.step()
            steps += 1
            assert len(handed_over) == steps
    assert steps == 6


def test_a_request_that_is_aborted_while_its_step_runs_leaves_nothing(model: Path) -> None:
    with LLMEngine.from_config(sections(model, null("late"))) as engine:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        engine.add_request("a", PROMPTS[0], params)
        engine.add_request("b", PROMPTS[1], params)
        for _ in range(4):
            engine.step()
        assert [output.outputs[0].finish_reason for output in engine.abort_request("a")] == ["abort"]
        engine.add_request("c", PROMPTS[0], params)
        finished = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    finished[output.request_id] = output.outputs[0].token_ids
        assert engine.cache_statistics().num_used_blocks == 0
    expected = tokens(model, "cpu", [params, params])
    assert [finished["c"], finished["b"]] == [expected[0][0], expected[1][0]]


CAPTURED = f"{Path(__file__).with_name('capturable.py')}:Capturable"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("drafts", [False, True])
def test_captured_steps_give_the_same_tokens(
    model: Path, order: str, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes filled up to a graph's size; verification filled up to a graph's query length."""
    replays = []
    run = GraphForward.run
    monkeypatch.setattr(
        GraphForward, "run", lambda self, *args: (run(self, *args), replays.append(self.num_replays))[0]
    )
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)] * 3
    more: dict[str, Any] = {"attention": CAPTURED}
    if drafts:
        more["speculative"] = {"drafters": {"ngram": {"name": "ngram"}}}
    executor = null(order, cuda_graphs=[2, 4])
    assert tokens(model, executor, params, **more) == tokens(model, "cpu", params)
    assert replays[-1] > len(replays) // 2


def test_sizes_that_cannot_be_captured_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="ReferenceBackend does not declare that it can be captured"):
        LLMEngine.from_config(sections(model, null(cuda_graphs=[2])))


def test_sizes_that_no_step_has_are_refused_before_weights_are_read(model: Path) -> None:
    for attention in (CAPTURED, "reference"):  # the size is named first, also where nothing can be captured
        options = sections(model, null(cuda_graphs=[2, 8]), attention=attention, scheduler={"max_num_seqs": 4})
        with pytest.raises(ConfigError, match=r"cuda_graphs \[2, 8\].*max_num_seqs is 4: leave out"):
            resolve(load_config(options))


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_slept_goes_on(model: Path, level: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(**sections(model, null("late"))) as llm:
        before = llm.generate(PROMPTS[:2], params)
        assert llm.engine.sleep(level) > 10_000
        with pytest.raises(RequestError, match="wake_up"):
            llm.generate(PROMPTS[:1], params)
        llm.engine.wake_up()
        after = llm.generate(PROMPTS[:2], params)
    assert [o.outputs[0].token_ids for o in after] == [o.outputs[0].token_ids for o in before]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("level", [1, 2])
def test_graphs_do_not_outlive_a_sleep(model: Path, level: int, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold memory of their own: they are gone before the device is asked to give back what nobody uses."""
    captured: weakref.WeakSet[Graph] = weakref.WeakSet()
    left: list[int] = []
    capture = HostDevice.capture

    def captured_graph(device: HostDevice, work: Work) -> Graph:
        graph = capture(device, work)
        captured.add(graph)
        return graph

    monkeypatch.setattr(HostDevice, "capture", captured_graph)
    monkeypatch.setattr(HostDevice, "release_unused", lambda device: left.append(len(captured)))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(**sections(model, null(order, cuda_graphs=[2, 4]), attention=CAPTURED)) as llm:
        before = llm.generate(PROMPTS[:3], params)
        num_graphs = len(captured)
        llm.engine.sleep(level)
        assert (num_graphs, left) == (2, [0])
        llm.engine.wake_up()
        assert len(captured) == num_graphs
        after = llm.generate(PROMPTS[:3], params)
    assert [o.outputs[0].token_ids for o in after] == [o.outputs[0].token_ids for o in before]


def test_a_capture_without_memory_ends_a_worker_that_wakes_up(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As any capture that fails: the engine cannot be woken up again."""

    def without_memory(device: HostDevice, work: Work) -> Graph:
        raise CapacityError("no memory is left for captured graphs")

    with LLM(**sections(model, null("late", cuda_graphs=[2]), attention=CAPTURED)) as llm:
        llm.engine.sleep(1)
        monkeypatch.setattr(HostDevice, "capture", without_memory)
        for _ in range(2):
            with pytest.raises(WorkerError, match="cannot be used any more: no memory is left"):
                llm.engine.wake_up()


def test_what_wakes_up_is_filled_in_launched_work(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps and reading stand in one stream, whichever the calling thread's own is."""
    inside: list[bool] = []
    within = [0]
    launch, load = HostDevice.launch, loaded_model.read_weights

    def launched(device: HostDevice, work: Work, **more: Any) -> None:
        def watched() -> None:
            within[0] += 1
            work()
            within[0] -= 1

        launch(device, watched, **more)

    monkeypatch.setattr(HostDevice, "launch", launched)
    monkeypatch.setattr(loaded_model, "read_weights", lambda *args: (inside.append(within[0] > 0), load(*args))[1])
    with LLM(**sections(model, null("late"))) as llm:
        llm.engine.sleep(2)
        llm.engine.wake_up()
    assert inside == [True]


def test_waking_up_can_be_tried_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint was away, say; the engine goes on sleeping meanwhile."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    load = loaded_model.read_weights

    def fail(*args: Any) -> None:
        raise ModelError("model.safetensors is not there")

    with LLM(**sections(model, null("late"))) as llm:
        before = llm.generate(PROMPTS[:2], params)
        llm.engine.sleep(2)
        monkeypatch.setattr(loaded_model, "read_weights", fail)
        with pytest.raises(ModelError, match="not there"):
            llm.engine.wake_up()
        monkeypatch.setattr(loaded_model, "read_weights", load)
        llm.engine.wake_up()
        after = llm.generate(PROMPTS[:2], params)
    assert [o.outputs[0].token_ids for o in after] == [o.outputs[0].token_ids for o in before]


@pytest.mark.parametrize(("level", "quantization"), [(2, None), (1, "q8"), (2, "q8")])
def test_recordings_of_passes_do_not_outlive_a_sleep(
    tmp_path: Path, level: int, quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold the addresses of weights, which move. One request at a time, so that steps repeat."""
    save_tiny_model(tmp_path, tiny_config("llama"))
    replays = []
    run = Replay.run
    monkeypatch.setattr(Replay, "run", lambda self: (run(self), replays.append(self))[0])
    options = sections(tmp_path, "cpu", attention="paged_cpu")
    options["model"] |= {"operators": "native", "quantization": quantization}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(**options) as llm:
        before = llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids
        recorded = list(replays)
        llm.engine.sleep(level)
        llm.engine.wake_up()
        after = llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids
    assert after == before
    assert bool(recorded) == (quantization == "q8")
    assert not any(replay in recorded for replay in replays[len(recorded) :])


def test_an_engine_does_not_fall_asleep_over_its_work(model: Path) -> None:
    with LLMEngine.from_config(sections(model, null())) as engine:
        with pytest.raises(ConfigError, match="level 3"):
            engine.sleep(3)
        engine.add_request("a", PROMPTS[0], SamplingParams(max_tokens=2))
        with pytest.raises(RequestError, match="unfinished"):
            engine.sleep()
