"""OpenAI's client and LangChain's, over a socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage, convert_to_openai_messages
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai import ChatOpenAI

from dovetail.testing.chat_models import FAMILIES, Family

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
HELLO: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]


class Weather(pydantic.BaseModel):
    """Where to look."""

    city: str


@tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


@pytest.fixture
def client(hermes: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{hermes.server.url}/v1", api_key="none", max_retries=0) as created:
        yield created


@pytest.fixture
def unshowing(serve_family: Callable[..., Any]) -> Any:
    """A ChatML model whose template shows no tools."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    special = FAMILIES["hermes"].special
    return serve_family("unshowing", Family(template, special), dialect={"name": "hermes"})


def test_openais_stream_of_events(client: openai.OpenAI, hermes: Any) -> None:
    tools: list[Any] = [openai.pydantic_function_tool(Weather, name="get_weather")]
    tools[0]["function"]["strict"] = True
    said = hermes.says(CALL)
    said["chat_template_kwargs"] = {"enable_thinking": False}
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "tools": tools, "extra_body": said}
    with client.chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    (call,) = streamed.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == Weather(city="Paris")
    whole = client.chat.completions.parse(**asked)
    (again,) = whole.choices[0].message.tool_calls or ()
    assert (again.function.name, again.function.arguments) == (call.function.name, call.function.arguments)


def test_openais_parsed_responses(client: openai.OpenAI, hermes: Any) -> None:
    said = {**hermes.says('{"city": "Paris"}'), "chat_template_kwargs": {"enable_thinking": False}}
    parsed = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Weather, extra_body=said)
    assert parsed.choices[0].message.parsed == Weather(city="Paris")
    response = client.responses.parse(model="tiny", input="Hello", text_format=Weather, extra_body=said)
    assert response.output_parsed == Weather(city="Paris")


@pytest.mark.parametrize("through", ["chat", "responses"])
@pytest.mark.parametrize("streams", [False, True])
def test_langchain_runs_a_tool(hermes: Any, through: str, streams: bool) -> None:
    def model(text: str) -> Any:
        chat = ChatOpenAI(
            model="tiny",
            base_url=f"{hermes.server.url}/v1",
            api_key=pydantic.SecretStr("none"),
            max_retries=0,
            streaming=streams,
            use_responses_api=through == "responses",
            extra_body=hermes.says(text),
        )
        return chat.bind_tools([get_weather])

    question = HumanMessage("Hello")
    first = model(CALL).invoke([question])
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    last = model("It is sunny.").invoke([question, first, result])
    assert last.text == "It is sunny."
    assert not last.tool_calls


def test_a_template_of_the_examples_shows_tools(unshowing: Any) -> None:
    """A model whose own template shows none, and LangChain's agent loop: a question, a call, a result, an answer."""
    template = (Path(__file__).resolve().parents[4] / "examples" / "tools_chatml.jinja").read_text()

    def model(text: str) -> Any:
        chat = ChatOpenAI(
            model="tiny",
            base_url=f"{unshowing.server.url}/v1",
            api_key=pydantic.SecretStr("none"),
            max_retries=0,
            extra_body={"chat_template": template, **unshowing.says(text)},
        )
        return chat.bind_tools([get_weather])

    talk: list[Any] = [SystemMessage("Be brief."), HumanMessage("Hello")]
    first = model(CALL).invoke(talk)
    (call,) = first.tool_calls
    talk += [first, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
    assert model("It is sunny.").invoke(talk).text == "It is sunny."
    body = {"messages": convert_to_openai_messages(talk), "tools": [convert_to_openai_tool(get_weather)]}
    rendered = unshowing.post("/v1/chat/completions/render", {**body, "chat_template": template})["prompt"]
    assert rendered.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert '"description": "Weather of a city."' in rendered
    assert rendered.count("Be brief.") == 1
    assert f"<|im_start|>assistant\n\n{CALL}<|im_end|>" in rendered
    assert "<tool_response>\nsunny in Paris\n</tool_response>" in rendered
