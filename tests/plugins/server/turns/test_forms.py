"""What a request asks of the form of an answer is what a model that says anything has to keep to."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from dovetail.testing.chat_models import FAMILIES, Family

HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def tool(name: str, *, strict: bool = True) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": strict}}


def ask(served: Any, family: str, **body: Any) -> dict[str, Any]:
    """Any text: the model is random, and does not begin to reason."""
    options = {"chat_template_kwargs": {"enable_thinking": False}} if family == "hermes" else {}
    if family == "mistral":  # its template cannot say that there is no reasoning
        (think,) = served.post("/tokenize", {"prompt": "[THINK]", "add_special_tokens": False})["tokens"]
        options["logit_bias"] = {str(think): -100}
    answer = served.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 400, "seed": 1, **options, **body})
    choice: dict[str, Any] = answer["choices"][0]
    return choice


@pytest.mark.parametrize("family", ["hermes", "mistral", "llama3_json"])
def test_required_calls_are_made(serve: Callable[[str], Any], family: str) -> None:
    body = {"tools": [tool("get_weather"), tool("book")], "parallel_tool_calls": False}
    choice = ask(serve(family), family, tool_choice="required", **body)
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert call["function"]["name"] in ("get_weather", "book")
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["city"] in ("Paris", "Rome")
    assert not (choice["message"]["content"] or "").strip()


@pytest.mark.parametrize("family", ["hermes", "mistral", "llama3_json"])
def test_the_tool_that_is_named_is_called(serve: Callable[[str], Any], family: str) -> None:
    named = {"type": "function", "function": {"name": "book"}}
    choice = ask(serve(family), family, tools=[tool("get_weather"), tool("book")], tool_choice=named)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "book"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "book"}}])
@pytest.mark.parametrize("family", ["hermes", "mistral", "llama3_json"])
def test_arguments_of_a_call_that_has_to_be_made_fit_the_schema(
    serve: Callable[[str], Any], family: str, choice: Any
) -> None:
    """Without `strict`: the model is random, and would hit no schema by itself."""
    body = {"tools": [tool("book", strict=False)], "parallel_tool_calls": False, "tool_choice": choice}
    (call,) = ask(serve(family), family, **body)["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert (arguments["city"] in ("Paris", "Rome"), arguments["days"] in (1, 2)) == (True, True)


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("family", ["hermes", "mistral", "llama3_json"])
def test_tools_that_are_not_allowed_are_seen_and_not_called(serve: Callable[[str], Any], family: str) -> None:
    tools = [tool("get_weather", strict=False), tool("book")]
    choice = ask(serve(family), family, tools=tools, tool_choice=allowed("book", mode="required"))
    assert {call["function"]["name"] for call in choice["message"]["tool_calls"]} == {"book"}
    body = {"messages": HELLO, "tools": tools, "tool_choice": allowed("book")}
    assert "get_weather" in serve(family).post("/v1/chat/completions/render", body)["prompt"]


def test_responses_name_the_tools_that_are_allowed(hermes: Any) -> None:
    tools = [{**tool(name)["function"], "type": "function"} for name in ("get_weather", "book")]
    chosen = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "book"}]}
    body = {"input": "Hello", "tools": tools, "tool_choice": chosen, "seed": 1, "max_output_tokens": 400}
    answer = hermes.post("/v1/responses", {**body, "chat_template_kwargs": {"enable_thinking": False}})
    assert {item["name"] for item in answer["output"] if item["type"] == "function_call"} == {"book"}
    assert answer["tool_choice"] == chosen


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        {"guided_json": SCHEMA},
    ],
)
@pytest.mark.parametrize("family", ["hermes", "llama3_json"])
def test_formats_are_kept_to(serve: Callable[[str], Any], family: str, asked: dict[str, Any]) -> None:
    choice = ask(serve(family), family, **asked)
    trip = json.loads(choice["message"]["content"])
    assert trip["city"] in ("Paris", "Rome")
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("asked", "answers"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}),
        ({"structured_outputs": {"regex": "a|bc"}}, {"a", "bc"}),
        ({"guided_choice": ["yes"]}, {"yes"}),
        ({"structured_outputs": {"grammar": 'start: "on" | "off"'}}, {"on", "off"}),
    ],
)
def test_other_forms_are_kept_to(hermes: Any, asked: dict[str, Any], answers: set[str]) -> None:
    assert ask(hermes, "hermes", **asked)["message"]["content"] in answers


def test_a_form_begins_behind_reasoning(hermes: Any) -> None:
    """The prompt opens the reasoning; what the model is told to say ends it, and then the form begins."""
    options = {"chat_template_kwargs": {"enable_thinking": True}}
    for asked in ({"structured_outputs": {"regex": "yes"}}, {"structured_outputs": {"choice": ["yes"]}}):
        said = hermes.says("Hm.\n</think>\n\nyes") if "choice" in str(asked) else hermes.says("Hm.</think>yes")
        choice = ask(hermes, "llama3_json", **options, **asked, **said)
        assert choice["message"]["reasoning"] == "Hm."
        assert choice["message"]["content"] == "yes"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}, "tools": [tool("a")]}, "tool_choice"),
        ({"tool_choice": allowed("b"), "tools": [tool("a")]}, "tool_choice"),
        ({"tool_choice": allowed("b")}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [tool("a")], "tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice"),
        ({"tools": [tool("a"), tool("a")]}, "tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": "a", "colour": "red"}]}, "messages.0.colour"),
        ({"messages": []}, "messages"),
        ({"chat_template_kwargs": {"no_such_variable": 1}}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"echo": True}, "echo"),
        ({"functions": []}, "functions"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "tools": [tool("a", strict=False)]}, "structured_outputs"),
        ({"structured_outputs": {"json": {}}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
def test_what_is_refused_is_named(hermes: Any, body: dict[str, Any], param: str) -> None:
    error = hermes.post("/v1/chat/completions", {"messages": HELLO, **body}, 400)["error"]
    assert error["param"].startswith(param), error
    assert error["type"] == "invalid_request_error"


def test_the_message_that_is_continued_may_be_shown(hermes: Any) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "I say"}]
    body = {"messages": messages, "continue_final_message": True, "echo": True, **hermes.says(" hello.")}
    assert hermes.post("/v1/chat/completions", body)["choices"][0]["message"]["content"] == "I say hello."
    prompt = hermes.post("/v1/chat/completions/render", body)["prompt"]
    assert prompt.endswith("<|im_start|>assistant\nI say")


def test_log_probabilities_and_token_ids(hermes: Any) -> None:
    said = hermes.says("é!")
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "return_token_ids": True, **said}
    answer = hermes.post("/v1/chat/completions", body)
    (choice,) = answer["choices"]
    script = said["processors"]["script"]
    assert choice["token_ids"][:-1] == script
    content = choice["logprobs"]["content"]
    assert len(content) == len(choice["token_ids"])
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert (content[2]["token"], content[2]["bytes"]) == ("!", [33])
    assert content[0]["bytes"] is None  # half of a character
    ids = hermes.post("/v1/chat/completions", {**body, "return_tokens_as_token_ids": True})
    assert ids["choices"][0]["logprobs"]["content"][2]["token"] == f"token_id:{script[2]}"
    assert answer["prompt_token_ids"] == hermes.post("/v1/chat/completions/render", body)["prompt_token_ids"]


def test_a_schema_that_cannot_be_kept_to_is_a_bad_request(hermes: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "no such type"}}}
    asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    for body in (asked, {**asked, "stream": True}):
        error = hermes.post("/v1/chat/completions", {"messages": HELLO, **body}, 400)["error"]
        assert error["type"] == "invalid_request_error"


def test_completions_keep_to_forms_too(hermes: Any) -> None:
    body = {"prompt": "On or off?", "structured_outputs": {"choice": ["on", "off"]}, "seed": 1}
    assert hermes.post("/v1/completions", body)["choices"][0]["text"] in ("on", "off")


@pytest.fixture
def unreasoning(serve_family: Callable[..., Any]) -> Any:
    """A ChatML model without `<think>` in its template or its vocabulary."""
    template = FAMILIES["hermes"].template
    start, end = template.index("{% if m.reasoning_content %}"), template.index("{{ m.content if")
    template = template[:start] + template[end:]
    template = template[: template.index("{% if enable_thinking")] + "{% endif %}"
    return serve_family("unreasoning", Family(template, FAMILIES["hermes"].special, ("<tool_call>", "</tool_call>")))


@pytest.fixture
def xgrammar(serve_family: Callable[..., Any]) -> Any:
    """A model that may reason, whose grammars another plugin compiles."""
    pytest.importorskip("xgrammar")
    return serve_family("xgrammar", FAMILIES["hermes"], grammar="xgrammar")


@pytest.mark.parametrize("form", ["response_format", "tools"])
def test_a_form_leaves_no_room_for_reasoning_where_the_model_knows_none(unreasoning: Any, form: str) -> None:
    """However likely the model thinks the marker's beginning: of all that is legal, small models take what they may."""
    bound: dict[str, Any] = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}},
        "tools": [tool("book")],
    }
    (bracket,) = unreasoning.post("/tokenize", {"prompt": "<", "add_special_tokens": False})["tokens"]
    body = {form: bound[form], "tool_choice": "required" if form == "tools" else None, "seed": 1, "max_tokens": 400}
    likely = {"logit_bias": {str(bracket): 50}}
    answer = unreasoning.post("/v1/chat/completions", {"messages": HELLO, **body, **likely})
    message = answer["choices"][0]["message"]
    assert not message.get("reasoning")
    said = message["content"] if form == "response_format" else message["tool_calls"][0]["function"]["arguments"]
    assert json.loads(said)["city"] in ("Paris", "Rome")


def test_a_template_of_the_request_may_know_reasoning(unreasoning: Any) -> None:
    thoughts = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    template = "{% for m in messages %}" + thoughts + "{{ m.content }}{% endfor %}"
    form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
    said = '<think>\nHm.\n</think>\n\n{"city": "Paris", "days": 1}'
    body = {"chat_template": template, "response_format": form, "max_tokens": 60, **unreasoning.says(said)}
    answer = unreasoning.post("/v1/chat/completions", {"messages": HELLO, **body})
    assert answer["choices"][0]["message"]["reasoning"] == "Hm."


def test_tools_that_the_template_does_not_show_are_refused(hermes: Any) -> None:
    body = {"messages": HELLO, "tools": [tool("book")], "chat_template": "{{ messages[0].content }}"}
    error = hermes.post("/v1/chat/completions", body, status=400)["error"]
    assert error["param"] == "tools"
    assert "does not read them" in error["message"]


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}},
        {"structured_outputs": {"choice": ["Paris", "Rome"]}},
    ],
)
def test_a_form_alone_needs_no_grammar_of_a_dialect(xgrammar: Any, asked: dict[str, Any]) -> None:
    """xgrammar has forms of its own for JSON and choices, and does not read what dialects write."""
    options = {"seed": 1, "max_tokens": 400, "chat_template_kwargs": {"enable_thinking": False}}
    answer = xgrammar.post("/v1/chat/completions", {"messages": HELLO, **options, **asked})
    content = answer["choices"][0]["message"]["content"]
    assert content in ("Paris", "Rome") or json.loads(content)["city"] in ("Paris", "Rome")


BAD_SCHEMA = {"type": "object", "properties": {"a": {"type": "strng"}}}
UNKEPT_SCHEMA = {"type": "object", "properties": {"a": {"not": {}}}}


def of_tool(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "trip", "parameters": schema}}


@pytest.mark.parametrize("schema", [BAD_SCHEMA, UNKEPT_SCHEMA], ids=["wrong", "not enforced"])
@pytest.mark.parametrize(
    ("form", "param"),
    [
        (lambda schema: {"tools": [of_tool(schema)], "tool_choice": "required"}, "tools"),
        (
            lambda schema: {
                "tools": [of_tool(schema), tool("book")],
                "tool_choice": {"type": "function", "function": {"name": "trip"}},
            },
            "tools",
        ),
        (
            lambda schema: {
                "response_format": {"type": "json_schema", "json_schema": {"name": "trip", "schema": schema}}
            },
            "response_format",
        ),
        (lambda schema: {"guided_json": schema}, "guided_json"),
        (lambda schema: {"structured_outputs": {"json": schema}}, "structured_outputs"),
    ],
    ids=["required", "named", "response_format", "guided_json", "structured_outputs"],
)
def test_a_schema_that_cannot_be_compiled_is_refused_where_it_is(
    hermes: Any, schema: dict[str, Any], form: Callable[[Any], dict[str, Any]], param: str
) -> None:
    """The text of the dialect's grammar around it is nobody's."""
    error = hermes.post("/v1/chat/completions", {"messages": HELLO, **form(schema)}, 400)["error"]
    assert error["param"] == param
    assert error["message"].startswith("tool 'trip': " if param == "tools" else "")
    assert "schema" in error["message"]
    assert "call_0" not in error["message"]
