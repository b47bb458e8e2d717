"""/v1/chat/completions: whole and streamed, with tools, reasoning and formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail.contracts.dialect import AssistantMessage, ToolCall
from dovetail.engine.dialects import create_dialect
from dovetail.testing.chat_models import FAMILIES

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def stream(served: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks."""
    response = served.client.post(PATH, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def put_together(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """What a client makes of the deltas of one choice."""
    message: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    logprobs: list[Any] = []
    reason = None
    for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
        assert reason is None, "nothing comes behind the end"
        reason = choice["finish_reason"]
        logprobs += (choice["logprobs"] or {}).get("content", [])
        delta = choice["delta"]
        for key in ("content", "reasoning", "reasoning_content"):
            if delta.get(key):
                message[key] = message.get(key, "") + delta[key]
        for part in delta.get("tool_calls", ()):
            call = calls.setdefault(part["index"], {"function": {"name": "", "arguments": ""}})
            call |= {key: part[key] for key in ("id", "type", "status") if key in part}
            for key, text in part.get("function", {}).items():
                call["function"][key] += text
    return {
        **message,
        "tool_calls": [calls[number] for number in sorted(calls)],
        "finish_reason": reason,
        "logprobs": logprobs,
    }


def whole(answer: dict[str, Any], index: int = 0) -> dict[str, Any]:
    """The same of a response that was not streamed."""
    choice = answer["choices"][index]
    message = {key: value for key, value in choice["message"].items() if key != "role" and value}
    logprobs = (choice["logprobs"] or {}).get("content", [])
    return {"tool_calls": [], **message, "finish_reason": choice["finish_reason"], "logprobs": logprobs}


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    calls = [{key: value for key, value in call.items() if key != "id"} for call in answer["tool_calls"]]
    return {**answer, "tool_calls": calls}


def test_text(hermes: Any) -> None:
    answer = hermes.post(PATH, {"messages": HELLO, **hermes.says("Hello back.")})
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello back."}
    assert choice["finish_reason"] == "stop"
    assert answer["object"] == "chat.completion"
    prompt = hermes.post(f"{PATH}/render", {"messages": HELLO})
    assert prompt["prompt"] == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert answer["usage"]["prompt_tokens"] == prompt["count"] == len(prompt["prompt_token_ids"])
    assert answer["usage"]["completion_tokens"] == len("Hello back.") + 1


def test_reasoning_and_calls(hermes: Any) -> None:
    said = hermes.says(f"<think>\nThey want it.\n</think>\n\nLet me see.\n{CALL}")
    answer = hermes.post(PATH, {"messages": HELLO, "tools": TOOLS, **said})
    (choice,) = answer["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == message["reasoning"] == "They want it."
    assert message["content"] == "Let me see."
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert choice["finish_reason"] == "tool_calls"
    hidden = hermes.post(PATH, {"messages": HELLO, "tools": TOOLS, "include_reasoning": False, **said})
    assert "reasoning" not in hidden["choices"][0]["message"]


def test_markers_that_are_special_tokens_are_read(mistral: Any) -> None:
    said = mistral.says('[THINK]Hm.[/THINK][TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}')
    answer = mistral.post(PATH, {"messages": HELLO, "tools": TOOLS, **said})
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == "Hm."
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    again = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
    ]
    prompt = mistral.post(f"{PATH}/render", {"messages": again})["prompt"]
    assert prompt.endswith('[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}</s>[TOOL_RESULTS]sunny[/TOOL_RESULTS]')


def test_a_call_without_tools_is_text(hermes: Any) -> None:
    answer = hermes.post(PATH, {"messages": HELLO, **hermes.says(CALL)})
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": CALL}
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "none", **hermes.says(CALL)}
    assert hermes.post(PATH, body)["choices"][0]["message"] == {"role": "assistant", "content": CALL}


def test_a_stop_token_of_the_dialect_ends_the_turn(llama: Any) -> None:
    said = llama.says('{"name": "get_weather", "parameters": {"city": "Paris"}}<|eom_id|>not shown')
    answer = llama.post(PATH, {"messages": HELLO, "tools": TOOLS, **said})
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'


@pytest.mark.parametrize("num_tokens", range(30, 70, 4))
def test_a_call_that_is_cut_off_is_not_passed_for_whole(hermes: Any, num_tokens: int) -> None:
    body = {"messages": HELLO, "tools": TOOLS, "max_tokens": num_tokens, **hermes.says(CALL)}
    answer = whole(hermes.post(PATH, body))
    assert without_ids(put_together(stream(hermes, body))) == without_ids(answer)
    assert answer["finish_reason"] in ("length", "stop", "tool_calls")
    for call in answer["tool_calls"]:
        if call.get("status") == "incomplete":
            assert answer["finish_reason"] == "length"
        else:
            assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}


def test_a_call_that_breaks_off_is_marked(hermes: Any) -> None:
    said = hermes.says('<tool_call>\n{"name": "get_weather", "arguments": {"city": oops}}\n</tool_call>')
    answer = hermes.post(PATH, {"messages": HELLO, "tools": TOOLS, **said})
    (choice,) = answer["choices"]
    assert choice["message"]["tool_calls"][0]["status"] == "incomplete"
    assert choice["finish_reason"] == "stop"


WORDS = st.lists(
    st.sampled_from(["Paris", " ", "\n", "<", "<tool", "</think", "é", "🦊", '{"a": 1}', "[TOOL", "x"]), max_size=8
).map("".join)
CALLS = st.builds(
    lambda city: ToolCall(name="get_weather", arguments=json.dumps({"city": city}, ensure_ascii=False)), WORDS
)


@pytest.mark.parametrize("family", ["hermes", "mistral", "llama3_json"])
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    reasoning=WORDS,
    content=WORDS,
    calls=st.lists(CALLS, max_size=2),
    num_tokens=st.integers(1, 120),
    thinks=st.sampled_from([None, True, False]),
    extras=st.fixed_dictionaries(
        {}, optional={"stream_options": st.just({"include_usage": True}), "n": st.just(2), "logprobs": st.just(True)}
    ),
)
def test_what_is_streamed_is_what_is_whole(
    serve: Callable[[str], Any],
    family: str,
    reasoning: str,
    content: str,
    calls: list[ToolCall],
    num_tokens: int,
    thinks: bool | None,
    extras: dict[str, Any],
) -> None:
    served = serve(family)
    dialect = create_dialect(served.engine.facts)
    assert dialect is not None
    can = dialect.capabilities
    made = tuple(calls if can.parallel_calls else calls[:1])
    message = AssistantMessage(reasoning=reasoning if can.reasoning else "", content=content, calls=made)
    said = served.says(dialect.render_message(message))
    options = {k: v for k, v in extras.items() if k != "stream_options"}
    if "n" in options:
        said["temperature"] = 1.0
    body = {"messages": HELLO, "tools": TOOLS, "max_tokens": num_tokens, **said, **options}
    if thinks is not None and family == "hermes":
        body["chat_template_kwargs"] = {"enable_thinking": thinks}
    answer = served.post(PATH, body)
    chunks = stream(served, {**body, **extras})
    for index in range(options.get("n", 1)):
        assert without_ids(put_together(chunks, index)) == without_ids(whole(answer, index))
    if "stream_options" in extras:
        assert chunks[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]


def test_a_conversation_is_tokenized_as_it_is_rendered(hermes: Any) -> None:
    body = {"messages": HELLO, "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}}
    tokens = hermes.post("/tokenize", {**body, "return_token_strs": True})
    rendered = hermes.post(f"{PATH}/render", body)
    assert tokens["tokens"] == rendered["prompt_token_ids"]
    assert "".join(tokens["token_strs"]) == rendered["prompt"]
    assert hermes.post("/tokenize", {**body, "prompt": "x"}, 400)["error"]["param"] == "prompt"
    assert hermes.post("/tokenize", {"prompt": "x", "tools": TOOLS}, 400)["error"]["param"] == "tools"


def test_an_engine_without_a_dialect_refuses_chats_and_serves_the_rest(serve_family: Callable[..., Any]) -> None:
    served = serve_family("without dialect", FAMILIES["hermes"], dialect=None)
    refusal = served.post(PATH, {"messages": HELLO}, status=501)
    assert "dialect is null" in refusal["error"]["message"]
    answer = served.post("/v1/completions", {"prompt": "One", "max_tokens": 2, **served.says("so")})
    assert answer["choices"][0]["text"] == "so"
