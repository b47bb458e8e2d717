"""`LLM.generate` and `LLM.chat`: forms of prompts and parameters, and calls that end early."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, LLMEngine, SamplingParams
from dovetail.contracts.errors import RequestError
from dovetail.contracts.outputs import RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_one_prompt_of_token_ids_is_one_prompt(make_llm: Callable[..., LLM], hf_greedy: Callable[..., Any]) -> None:
    outputs = make_llm().generate([5, 6, 7], GREEDY)
    assert tokens(outputs) == [hf_greedy([5, 6, 7], 4)]
    assert outputs[0].prompt_token_ids == [5, 6, 7]
    assert outputs[0].prompt is None


@pytest.mark.parametrize("form", [list, tuple, lambda ids: {"prompt_token_ids": list(ids)}])
def test_forms_of_token_prompts(
    make_llm: Callable[..., LLM], hf_greedy: Callable[..., Any], form: Callable[[list[int]], Any]
) -> None:
    prompts = [[5, 6, 7], [9], [8, 8, 8, 8, 8]]
    outputs = make_llm().generate([form(prompt) for prompt in prompts], GREEDY)
    assert tokens(outputs) == [hf_greedy(prompt, 4) for prompt in prompts]


def test_forms_of_text_prompts(make_stories: Callable[..., LLM]) -> None:
    llm = make_stories()
    text = "Once upon a time"
    ids = llm.get_tokenizer().encode(text)
    forms = [text, {"prompt": text}, {"prompt_token_ids": ids}, {"prompt": text, "prompt_token_ids": ids}]
    outputs = llm.generate(forms, GREEDY)
    assert len({output.outputs[0].text for output in outputs}) == 1
    assert [output.prompt for output in outputs] == [text, text, None, text]
    assert llm.generate(text, GREEDY)[0].outputs == outputs[0].outputs
    assert llm.generate({"prompt": text}, GREEDY)[0].outputs == outputs[0].outputs


def test_no_prompts_no_outputs(make_llm: Callable[..., LLM]) -> None:
    assert make_llm().generate([], GREEDY) == []


def test_each_prompt_has_its_own_parameters(make_llm: Callable[..., LLM], hf_greedy: Callable[..., Any]) -> None:
    params = [SamplingParams(temperature=0, max_tokens=count) for count in (1, 7, 3)]
    outputs = make_llm().generate([[5, 6], [7, 8], [9, 10]], params)
    assert tokens(outputs) == [hf_greedy(ids, n) for ids, n in (([5, 6], 1), ([7, 8], 7), ([9, 10], 3))]


def test_lists_of_other_lengths_are_refused(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    with pytest.raises(RequestError, match="sampling_params has 1 entries for 2 prompts"):
        llm.generate([[5], [6]], [GREEDY])
    with pytest.raises(RequestError, match="priority has 3 entries for 2 prompts"):
        llm.generate([[5], [6]], GREEDY, priority=[0, 1, 2])


def test_one_bad_prompt_refuses_the_call_before_anything_runs(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.generate([[5, 6], []], GREEDY)
    assert llm.engine.request_ids == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (b"bytes", "a prompt is text, a list of token ids or a mapping, got bytes"),
        ({"text": "x"}, "unknown prompt key 'text'; give 'prompt'"),
        ({}, "got NoneType"),
        ("text", "has no tokenizer"),
    ],
)
def test_other_prompts_are_refused(make_llm: Callable[..., LLM], prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make_llm().generate([prompt], GREEDY)


def test_priority_decides_who_runs_first(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(scheduler={"name": "priority", "max_num_seqs": 1})
    outputs = llm.generate([[5], [6], [7]], GREEDY, priority=[2, 0, 1])
    finished = [output.metrics.finished_time or 0.0 for output in outputs]
    assert finished[1] < finished[2] < finished[0]


def test_truncate_prompt_tokens_keeps_the_last(make_llm: Callable[..., LLM], hf_greedy: Callable[..., Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, truncate_prompt_tokens=3)
    output = make_llm().generate([1, 2, 3, 4, 5, 6], params)[0]
    assert output.prompt_token_ids == [4, 5, 6]
    assert output.outputs[0].token_ids == hf_greedy([4, 5, 6], 4)


def test_defaults_come_from_the_generation_config(tiny_llama: tuple[Path, Any], make_llm: Callable[..., LLM]) -> None:
    recommended = {"generation_config": {"temperature": 0.5, "top_k": 7, "do_sample": True, "max_new_tokens": 9}}
    llm = make_llm(model={"hf_overrides": recommended})
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=7, max_tokens=9)
    assert len(llm.generate([5, 6])[0].outputs[0].token_ids) == 9


def test_do_sample_false_means_greedy(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(model={"hf_overrides": {"generation_config": {"do_sample": False, "temperature": 0.7}}})
    assert llm.get_default_sampling_params().is_greedy


def test_chat_equals_generate_on_the_rendered_template(make_stories: Callable[..., LLM]) -> None:
    llm = make_stories()
    talks = [
        [{"role": "user", "content": "Once upon"}],
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Lily was"}],
    ]
    rendered = ["<user>Once upon<bot>", "<system>Be kind.<user>Lily was<bot>"]
    outputs = llm.chat(talks, GREEDY, chat_template=TEMPLATE)
    assert [output.prompt for output in outputs] == rendered
    encoded = [llm.get_tokenizer().encode(text, add_special_tokens=False) for text in rendered]
    assert tokens(outputs) == tokens(llm.generate(encoded, GREEDY))
    assert llm.chat(talks[0], GREEDY, chat_template=TEMPLATE)[0].outputs == outputs[0].outputs


def test_chat_can_continue_the_last_message(make_stories: Callable[..., LLM]) -> None:
    talk = [{"role": "user", "content": "Hi"}, {"role": "bot", "content": "Once upon"}]
    output = make_stories().chat(
        talk, GREEDY, chat_template=TEMPLATE, add_generation_prompt=False, continue_final_message=True
    )
    assert output[0].prompt == "<user>Hi<bot>Once upon"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hello", "messages is text"),
        ([{"role": "user", "content": "x"}], "no chat template"),
    ],
)
def test_chat_refuses(make_stories: Callable[..., LLM], messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make_stories().chat(messages, GREEDY)


def test_chat_needs_a_tokenizer(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(RequestError, match="has no tokenizer"):
        make_llm().chat([{"role": "user", "content": "x"}])


STEPS = """
from dovetail.attention_backends.sdpa import SDPABackend

class Interrupted(SDPABackend):
    steps = 0

    def plan(self, batch):
        Interrupted.steps += 1
        if Interrupted.steps == 4:
            raise KeyboardInterrupt
        super().plan(batch)
"""


def test_ctrl_c_leaves_nothing_behind(
    make_llm: Callable[..., LLM],
    hf_greedy: Callable[..., Any],
    check_nothing_is_held: Callable[[LLMEngine], None],
    tmp_path: Path,
) -> None:
    plugin = tmp_path / "interrupted.py"
    plugin.write_text(STEPS)
    llm = make_llm(attention=f"{plugin}:Interrupted", scheduler={"max_num_seqs": 2})
    prompts = [[5, 6, 7], [9, 9], [8, 8, 8, 8, 8]]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=9))
    assert llm.engine.request_ids == []
    check_nothing_is_held(llm.engine)
    assert tokens(llm.generate(prompts, GREEDY)) == [hf_greedy(prompt, 4) for prompt in prompts]


def test_progress_shows_tokens_per_second(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    llm = make_llm()
    llm.generate([[5], [6]], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate([[5], [6]], GREEDY)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "in " in shown
    assert "tok/s; out " in shown


def test_the_model_directory_may_go_once_it_is_loaded(
    tiny_llama: tuple[Path, Any], make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(tiny_llama[0], copy)
    llm = make_llm(model={"path": str(copy)})
    shutil.rmtree(copy)
    assert len(llm.generate([5, 6], GREEDY)[0].outputs[0].token_ids) == 4
