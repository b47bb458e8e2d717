"""What each dialect reads and writes, in the models' own text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dovetail.contracts.dialect import (
    AssistantMessage,
    CallBegin,
    Dialect,
    DialectNeed,
    DialectRequest,
    DialectSetup,
    Tool,
    ToolCall,
    ToolChoice,
    message_of,
)
from dovetail.contracts.errors import RequestError
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import Environment
from dovetail.plugins.dialects.deepseek_r1 import DeepSeekR1Dialect
from dovetail.plugins.dialects.hermes import HermesDialect
from dovetail.plugins.dialects.llama3_json import Llama3Dialect
from dovetail.plugins.dialects.mistral import MistralDialect
from dovetail.plugins.dialects.plain import PlainDialect
from dovetail.plugins.dialects.qwen3_coder import Qwen3CoderDialect

ANY_TOOL = (Tool(name="f"),)
CALL = ToolCall(name="f", arguments='{"a": 1}')


def created(dialect: type[Dialect], special: tuple[str, ...] = (), **options: Any) -> Dialect:
    setup = DialectSetup(special_tokens={token: 1000 + index for index, token in enumerate(special)})
    return dialect(dialect.Options.model_validate(options), setup)


def read(dialect: Dialect, text: str, tools: tuple[Tool, ...] = ANY_TOOL) -> AssistantMessage:
    parser = dialect.parser(DialectRequest(tools=tools))
    return message_of([*parser.push(text), *parser.finish()])


@pytest.mark.parametrize(
    ("dialect", "text", "message"),
    [
        (HermesDialect, '<tool_call>{"name":"f","arguments":{"a": 1}}</tool_call>', AssistantMessage(calls=(CALL,))),
        (HermesDialect, '<tool_call>\n{"name": "f"}\n</tool_call>', ("f", "{}")),
        (HermesDialect, '<tool_call>\n{"name": "f", "parameters": {"a": 1}}\n</tool_call>', ("f", '{"a": 1}')),
        (HermesDialect, '<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>', ("f", '{"a": 1}')),
        (HermesDialect, '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', ("f", '{"a": "x\\ny"}')),
        (HermesDialect, "<tool_call>no JSON</tool_call>", AssistantMessage(content="<tool_call>no JSON</tool_call>")),
        (HermesDialect, "<think>a</think>b", AssistantMessage(reasoning="a", content="b")),
        (HermesDialect, "b <think>a</think>", AssistantMessage(content="b <think>a</think>")),
        (Llama3Dialect, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', ("f", '{"a": 1}')),
        (Llama3Dialect, '{"type": "function", "name": "f", "parameters": {"a": 1}}', ("f", '{"a": 1}')),
        (Llama3Dialect, '{"name": "Bob", "age": 3}', AssistantMessage(content='{"name": "Bob", "age": 3}')),
        (Llama3Dialect, "<|python_tag|>print(1)", AssistantMessage(content="<|python_tag|>print(1)")),
        (
            Llama3Dialect,
            '{"name": "f", "parameters": {"a": 1}};{"name": "f", "parameters": {"a": 1}}',
            AssistantMessage(calls=(CALL, CALL)),
        ),
        (MistralDialect, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "x"}]', ("f", '{"a": 1}')),
        (MistralDialect, '[TOOL_CALLS]f[ARGS]{"a": 1}', ("f", '{"a": 1}')),
        (MistralDialect, '[TOOL_CALLS]f{"a": 1}', ("f", '{"a": 1}')),
        (
            MistralDialect,
            '[TOOL_CALLS]f[CALL_ID]x7[ARGS]{"a": 1}',
            AssistantMessage(calls=(ToolCall(name="f", arguments='{"a": 1}', call_id="x7"),)),
        ),
        (MistralDialect, "[THINK]a[/THINK]b", AssistantMessage(reasoning="a", content="b")),
        (
            DeepSeekR1Dialect,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
            '{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n'
            '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            AssistantMessage(calls=(CALL, CALL)),
        ),
        (Qwen3CoderDialect, "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>", ("f", '{"a": "1"}')),
        (PlainDialect, "<think>a</think>", AssistantMessage(content="<think>a</think>")),
    ],
)
def test_reads_what_models_write(dialect, text, message):
    if isinstance(message, tuple):
        message = AssistantMessage(calls=(ToolCall(name=message[0], arguments=message[1]),))
    assert read(created(dialect), text) == message


TYPED = Tool(
    name="f",
    parameters={
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "exact": {"type": "boolean"},
            "place": {"$ref": "#/$defs/place"},
            "either": {"anyOf": [{"type": "number"}, {"type": "string"}]},
            "maybe": {"type": ["string", "null"]},
            "choice": {"enum": [1, 2]},
            "free": {},
        },
        "$defs": {"place": {"type": "object"}},
    },
)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("text", "5", '"5"'),
        ("text", "a\n  b\n", '"a\\n  b\\n"'),
        ("text", '<b class="x">', '"<b class=\\"x\\">"'),
        ("count", "5", "5"),
        ("count", "1.50e3", "1.50e3"),
        ("count", "five", '"five"'),
        ("count", "5 apples", '"5 apples"'),
        ("count", "", '""'),
        ("exact", "True", "true"),
        ("exact", "false", "false"),
        ("place", '{"x": [1.0]}', '{"x": [1.0]}'),
        ("place", "here", '"here"'),
        ("either", "2", "2"),
        ("either", "two", '"two"'),
        ("maybe", "null", "null"),
        ("maybe", "None", "null"),
        ("maybe", "nobody", '"nobody"'),
        ("choice", "2", "2"),
        ("free", "2", '"2"'),
        ("unknown", "2", '"2"'),
    ],
)
def test_untyped_text_gets_the_types_of_the_schema(name, text, value):
    written = f"<tool_call>\n<function=f>\n<parameter={name}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    [call] = read(created(Qwen3CoderDialect), written, (TYPED,)).calls
    assert (call.arguments, call.ending) == (f'{{"{name}": {value}}}', "complete")


def test_json_that_breaks_in_a_typed_value_ends_the_call():
    written = "<tool_call>\n<function=f>\n<parameter=place>\n{'x': 1}\n</parameter>\n</function>\n</tool_call>"
    message = read(created(Qwen3CoderDialect), written, (TYPED,))
    assert [call.ending for call in message.calls] == ["malformed"]
    assert message.content.startswith("'x': 1}")


def test_a_strict_string_with_a_pattern_is_refused_by_name():
    schema = {"type": "object", "properties": {"code": {"type": "string", "pattern": "^[A-Z]+$"}}}
    request = DialectRequest(tools=(Tool(name="f", parameters=schema, strict=True),))
    with pytest.raises(RequestError, match=r"tool 'f': .* parameter 'code' has the keyword pattern"):
        created(Qwen3CoderDialect).grammar(request)


def test_content_that_has_begun_stays_content_under_a_response_format():
    text = '{"answer": "<tool_call>{\\"name\\": 1}"} <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    parser = created(HermesDialect).parser(DialectRequest(tools=ANY_TOOL, response_format="%json {}"))
    assert message_of([*parser.push(text), *parser.finish()]) == AssistantMessage(content=text)


def test_a_call_is_known_before_its_arguments_are():
    parser = created(HermesDialect).parser(DialectRequest(tools=ANY_TOOL))
    assert parser.push('<tool_call>\n{"name": "f", "arguments": {')[0] == CallBegin(0, "f")


def test_mistral_writes_names_where_the_tokenizer_has_the_token():
    message = AssistantMessage(calls=(ToolCall(name="f", arguments="{}", call_id="x7"),))
    assert created(MistralDialect).render_message(message) == '[TOOL_CALLS][{"name": "f", "arguments": {}}]'
    assert created(MistralDialect, ("[ARGS]",)).render_message(message) == "[TOOL_CALLS]f[ARGS]{}"
    tokens = ("[ARGS]", "[CALL_ID]", "[TOOL_CALLS]")
    assert created(MistralDialect, tokens).render_message(message) == "[TOOL_CALLS]f[CALL_ID]x7[ARGS]{}"


def test_mistral_reads_what_mistrals_own_library_writes():
    """A list of calls with ids, as tokenizers of version 3 have it."""
    library = pytest.importorskip("mistral_common.tokens.tokenizers.mistral")
    from mistral_common.protocol.instruct.request import ChatCompletionRequest

    calls = [
        {"id": "123456789", "type": "function", "function": {"name": name, "arguments": json.dumps({"x": value})}}
        for name, value in (("add", [1, "é"]), ("sub", {"y": None}))
    ]
    messages = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "tool_calls": calls},
        *({"role": "tool", "content": "ok", "tool_call_id": "123456789"} for _ in calls),
    ]
    tokenizer = library.MistralTokenizer.v3(is_tekken=True)
    text = tokenizer.encode_chat_completion(ChatCompletionRequest.from_openai(messages)).text
    written = text[text.index("[TOOL_CALLS]") : text.index("</s>")]
    message = read(created(MistralDialect), written)
    assert message.content == ""
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == [
        ("add", {"x": [1, "é"]}),
        ("sub", {"x": {"y": None}}),
    ]


def need(template: str | None, **facts: Any) -> DialectNeed:
    asked = {"tools": False, "reasoning": False, "grammars": False, "is_named": False, "architecture": ""}
    return DialectNeed(**{**asked, "special_tokens": frozenset(), **facts}, chat_template=template)


TEMPLATES = {
    HermesDialect: "<tool_call>{{ call | tojson }}</tool_call>",
    Llama3Dialect: '<|start_header_id|> Respond in the format {"name": ..., "parameters": ...}',
    MistralDialect: "[TOOL_CALLS]",
    Qwen3CoderDialect: "<tool_call>\n<function=",
    DeepSeekR1Dialect: "<｜tool▁calls▁begin｜> ```json <think>",
    PlainDialect: "{{ messages }}",
}


@pytest.mark.parametrize("dialect", TEMPLATES, ids=lambda dialect: dialect.__name__)
def test_the_template_decides_which_dialect_auto_takes(dialect):
    environment = Environment("cpu", 1, 2**30)
    asked = sorted(TEMPLATES, key=lambda one: -one.preference)
    for_auto = need(TEMPLATES[dialect])
    fitting = [one for one in asked if not reasons_against(one, for_auto, one.Options(), environment)]
    assert fitting[0] is dialect


def test_a_dialect_that_is_named_serves_any_model():
    environment = Environment("cpu", 1, 2**30)
    for dialect in TEMPLATES:
        assert not reasons_against(dialect, need(None, is_named=True), dialect.Options(), environment)


def test_plain_refuses_tools_with_a_sentence():
    [reason] = reasons_against(PlainDialect, need(None, tools=True), PlainDialect.Options(), Environment("cpu", 1, 1))
    assert reason == "PlainDialect has no tool calls, and tools are asked for: choose another dialect."
    with pytest.raises(RequestError, match="neither calls nor reasoning"):
        created(PlainDialect).render_message(AssistantMessage(calls=(CALL,)))


def test_no_choice_leaves_no_room_for_calls_of_other_tools():
    tools = (Tool(name="f"), Tool(name="g"))
    grammar = created(HermesDialect).grammar(
        DialectRequest(tools=tools, choice=ToolChoice(mode="named", name="g"), reasoning=False)
    )
    assert grammar is not None
    assert '\\"g\\"' in grammar
    assert '\\"f\\"' not in grammar
