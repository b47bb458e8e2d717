"""`RolloutModule` over a tiny model: rollouts, the driver's own loop, new weights, and batches that are refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dovetail import LLM, LLMEngine, SamplingParams
from dovetail.contracts.errors import ConfigError, ModelError, RequestError
from dovetail.contracts.outputs import RequestOutput
from dovetail.contracts.pausing import EngineConflict
from dovetail.rl import ModuleOptions, RolloutModule
from dovetail.rl.difference import transformers_log_probs
from dovetail.testing.chat_models import FAMILIES, save_chat_model

PROMPTS = ["Once", "The little cat sat", "ab"]
PAD = 7
Make = Callable[..., RolloutModule]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chat")
    save_chat_model(directory, FAMILIES["hermes"])
    return directory


def sections(folder: Path) -> dict[str, Any]:
    model = {"path": str(folder), "dtype": "float32", "max_model_len": 40, "seed": 3}
    return {"model": model, "cache": {"num_blocks": 60}, "executor": {"threads": 1}}


def options(**changes: Any) -> ModuleOptions:
    return ModuleOptions(**{"seq_length": 32, "max_new_tokens": 10, "pad_token_id": PAD} | changes)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[LLMEngine]:
    with LLMEngine.from_config(weight_transport="in_process", **sections(folder)) as made:
        yield made


@pytest.fixture
def make(engine: LLMEngine) -> Iterator[Make]:
    """A module over the one engine, set up. After the test the engine has no requests."""

    class OverOne(RolloutModule):
        def model_provider(self) -> LLMEngine:
            return engine

    def made(**changes: Any) -> RolloutModule:
        module = OverOne(model_args=options(**changes))
        module.setup()
        return module

    yield made
    assert engine.request_ids == []


def batch(module: RolloutModule, prompts: Sequence[Any] = PROMPTS, is_eval: bool = True) -> dict[str, list[Any]]:
    dataset = module.build_dataset(prompts, is_eval)
    return dataset.collate_fn(dataset.data)


def unpadded(result: dict[str, Any]) -> list[list[int]]:
    totals = [len(q) + n for q, n in zip(result["no_padded_query_ids"], result["generation_lengths"], strict=True)]
    return [row[:total].tolist() for row, total in zip(result["all_tokens"], totals, strict=True)]


def written(outputs: list[RequestOutput]) -> list[list[int]]:
    return [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]


def test_training_and_evaluation_are_sampled_as_generate_samples(folder: Path) -> None:
    training: dict[str, Any] = {"temperature": 1.3, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1}
    args = options(**training, eval_temperature=0.7, eval_top_p=0.8, eval_top_k=9)
    module = RolloutModule(model_args=args, **sections(folder))
    module.setup()
    trained, evaluated = module.forward_step(batch(module)), module.eval_forward(batch(module))
    module.shutdown()
    with LLM(**sections(folder)) as llm:
        params = SamplingParams(**training, max_tokens=10)
        assert unpadded(trained) == written(llm.generate(PROMPTS, params, use_tqdm=False))
        params = SamplingParams(temperature=0.7, top_p=0.8, top_k=9, max_tokens=10)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert unpadded(evaluated) == written(outputs)
    assert evaluated["str_outputs"] == [output.outputs[0].text for output in outputs]
    assert evaluated["str_prompts"] == PROMPTS


def test_results_are_padded_and_their_log_probabilities_those_of_transformers(make: Make, folder: Path) -> None:
    module = make(num_inference_per_prompt=2)
    result = module.forward_step(batch(module, is_eval=False))
    assert result["all_tokens"].shape == result["loss_mask"].shape == (6, 32)
    assert result["logprobs"].shape == (6, 31)
    assert (result["all_tokens"].dtype, result["logprobs"].dtype) == (torch.int64, torch.float32)
    assert result["str_prompts"] == [PROMPTS[0]] * 2 + [PROMPTS[1]] * 2 + [PROMPTS[2]] * 2
    score = transformers_log_probs(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    for row, (ids, query) in enumerate(zip(unpadded(result), result["no_padded_query_ids"], strict=True)):
        start, end = len(query), len(ids)
        assert result["all_tokens"][row, end:].tolist() == [PAD] * (32 - end)
        assert result["loss_mask"][row].nonzero().flatten().tolist() == list(range(start, end))
        expected = torch.zeros(31)
        expected[start - 1 : end - 1] = torch.tensor(score(ids[:start], ids[start:]))
        torch.testing.assert_close(result["logprobs"][row], expected, atol=1e-4, rtol=0)


def test_a_driver_that_owns_the_loop_gets_what_eval_forward_returns(make: Make) -> None:
    module = make(eval_temperature=0.0)
    expected = module.eval_forward(batch(module))
    module._add_request(batch(module), is_eval=True)
    counts = []
    while module.num_requests:
        scheduled = module.schedule()
        counts.append(module.execute_step(scheduled))
        with pytest.raises(EngineConflict, match="executed before"):
            module.execute_step(scheduled)
    assert (counts[0], counts[-1]) == (3, 0)
    found = module.decode_internal(module.outputs)
    assert unpadded(found) == unpadded(expected)
    torch.testing.assert_close(found["logprobs"], expected["logprobs"])


def test_a_batch_is_aborted_where_it_is(make: Make) -> None:
    module = make(eval_temperature=0.0, ignore_eos=True)
    whole = unpadded(module.eval_forward(batch(module)))
    module._add_request(batch(module), is_eval=True)
    module.execute_step(module.schedule())
    module.schedule()
    with pytest.raises(EngineConflict, match="3 requests of the batch before"):
        module.eval_forward(batch(module))
    module.abort_requests()
    assert module.num_requests == 0
    result = module.decode_internal(module.outputs)
    assert (result["generation_lengths"].tolist(), result["truncated"].tolist()) == ([1] * 3, [True] * 3)
    assert unpadded(module.eval_forward(batch(module))) == whole


def test_a_driver_waits_while_its_requests_are_held(make: Make, engine: LLMEngine) -> None:
    module = make(eval_temperature=0.0)
    expected = unpadded(module.eval_forward(batch(module)))
    module._add_request(batch(module), is_eval=True)
    engine.hold(engine.request_ids)
    assert module.schedule() is None
    held = engine.request_ids
    resuming = threading.Thread(target=lambda: engine.resume(held))
    resuming.start()
    assert module.execute_step(None) == 3
    resuming.join()
    while module.execute_step(module.schedule()):
        pass
    assert unpadded(module.decode_internal(module.outputs)) == expected


def test_completions_may_go_on_to_the_sequences_length(make: Make) -> None:
    module = make(new_token_limit=False, ignore_eos=True)
    result = module.forward_step(batch(module))
    assert [len(ids) for ids in unpadded(result)] == [32, 32, 32]
    limited = make(ignore_eos=True).forward_step(batch(module))
    assert limited["generation_lengths"].tolist() == [10, 10, 10]


def test_a_stop_string_ends_a_completion(make: Make) -> None:
    text = make(eval_temperature=0.0, ignore_eos=True).eval_forward(batch(make()))["str_outputs"][0]
    stop = text[3]
    module = make(eval_temperature=0.0, ignore_eos=True, stop_token_list=f"{stop};<unheard of>")
    result = module.eval_forward(batch(module))
    assert result["str_outputs"][0] == text[: text.index(stop) + 1]
    assert not result["truncated"][0]


def test_a_dataset_keeps_what_prompts_have_with_them(make: Make) -> None:
    module = make(num_inference_per_prompt=3)
    prompts = [{"prompt": "ab", "answer": 4}, {"input_ids": [20, 21], "answer": 5}]
    data = batch(module, prompts, is_eval=False)
    assert data["answer"] == [4, 4, 4, 5, 5, 5]
    assert data["prompt"] == ["ab"] * 3 + [None] * 3
    assert len(data["input_ids"][0]) == 2
    assert len(module.build_dataset(prompts, is_eval=True)) == 2
    assert module.forward_step(data)["str_prompts"] == data["prompt"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"input_ids": []}, "one prompt at least"),
        ({"ids": [[1]]}, "no 'input_ids' .its keys: ids"),
        ([{"input_ids": [1]}], "dict of lists"),
        ({"input_ids": [[20], []]}, r"\[1\] must be the token ids"),
        ({"input_ids": [[20], [20] * 23]}, r"\[1\] has 23 tokens, and seq_length 32 leaves 22"),
        ({"input_ids": [[20], [9999]]}, "9999"),
        ({"input_ids": [[20]], "prompt": []}, "list of 1 texts"),
        ({"input_ids": [[20]], "prompt": "a"}, "list of 1 texts"),
    ],
)
def test_a_batch_that_is_wrong_is_refused_whole(make: Make, data: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make().forward_step(data)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [([], "empty"), ("Once", "must be a list"), ([3], r"prompts\[0\]"), (["ab", ""], r"\[1\]"), (["a" * 23], "23 tok")],
)
def test_prompts_that_make_no_dataset_are_refused(make: Make, prompts: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make().build_dataset(prompts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 32}, "seq_length 32, which leaves nothing"),
        ({"seq_length": "32"}, "seq_length is '32'"),
        ({"num_inference_per_prompt": 0}, "num_inference_per_prompt"),
        ({"eval_top_p": 1.5}, r"eval_\* sampling: top_p"),
        ({"seq_length": 41}, "takes 40 tokens"),
    ],
)
def test_options_that_no_request_may_have_are_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RolloutModule(model_args=options(**changes), **sections(folder)).setup()


def test_a_module_without_engine_says_what_to_call(folder: Path) -> None:
    module = RolloutModule(model=str(folder), model_args=options())
    with pytest.raises(RequestError, match="call setup first"):
        module.forward_step({"input_ids": [[1]]})
    module.shutdown()


def test_a_paused_engine_takes_no_batch(make: Make, engine: LLMEngine) -> None:
    module = make()
    data = batch(module)
    engine.pause("keep")
    with pytest.raises(EngineConflict, match="paused"):
        module.forward_step(data)
    engine.resume()


def test_buckets_of_parameters_replace_the_weights(make: Make, folder: Path) -> None:
    module = make(eval_temperature=0.0)
    old = load_file(folder / "model.safetensors")
    before = unpadded(module.eval_forward(batch(module)))
    module.pre_parameter_sync()
    module.parameter_sync(list(old.items())[:2])
    with pytest.raises(ModelError, match="missing"):
        module.post_parameter_sync()
    assert unpadded(module.eval_forward(batch(module))) == before

    twin = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for tensor in twin.parameters():
            tensor.add_(0.05 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    new = {name: tensor for name, tensor in twin.state_dict().items() if name in old}
    assert module.pre_parameter_sync(weight_version=5) == 5
    for item in new.items():
        module.parameter_sync([item])
    assert module.post_parameter_sync().version == 5
    result = module.eval_forward(batch(module))
    assert result["weight_version"].tolist() == [5, 5, 5]
    for ids, query in zip(unpadded(result), result["no_padded_query_ids"], strict=True):
        with torch.no_grad():
            best = twin(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        assert ids[len(query) :] == best[len(query) - 1 : -1]
    module.pre_parameter_sync()
    module.parameter_sync(old.items())
    module.post_parameter_sync()
    assert unpadded(module.eval_forward(batch(module))) == before


def test_parameters_need_their_transport(folder: Path) -> None:
    module = RolloutModule(model_args=options(), **sections(folder))
    module.setup()
    with pytest.raises(ConfigError, match="weight_transport: in_process"):
        module.pre_parameter_sync()
    module.shutdown()
