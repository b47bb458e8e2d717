"""Chat templates, against what transformers renders."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from dovetail.contracts.errors import RequestError
from dovetail.contracts.weights import TokenizerFiles
from dovetail.engine.tokenization.load import load_tokenizer
from dovetail.engine.tokenization.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}\n    {%- if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n"
    "    {%- endif %}\n{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}\n{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}"
    "{% else %}{% set loop_messages = messages %}{% set system = '' %}{% endif %}"
    "{% for m in loop_messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + (system if loop.first else '') + m['content'].strip() "
    "+ ' [/INST]' }}{% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
TOOLS = (
    "{{ bos_token }}{%- if tools %}\n# Tools\n{%- for tool in tools %}\n{{ tool | tojson(indent=2) }}{% endfor %}"
    "{%- endif %}\n{%- set ns = namespace(count=0) %}\n{%- for m in messages %}{% if m.content is not defined %}"
    "{% continue %}{% endif %}{%- set ns.count = ns.count + 1 %}\n{{ m.role | upper }} {{ ns.count }}: "
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endif %}"
    "{%- if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{%- endfor %}\n"
    "{% if add_generation_prompt %}{% if thinking | default(false) %}<think>{% endif %}ASSISTANT:{% endif %}"
)
GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
)
TRIMMED = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }} [end]\n{% endfor %}"
TEMPLATES = {"chatml": CHATML, "llama2": LLAMA2, "tools": TOOLS, "generation": GENERATION, "trimmed": TRIMMED}
TOOL = {"type": "function", "function": {"name": "f", "description": "é <b> & 'q'", "parameters": {"z": 1, "a": []}}}

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello <b>&amp; 'you'</b>\n  "}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "日本 😀"}],
    [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two "},
        {"role": "user", "content": "Three"},
    ],
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, tokenizer_jsons: dict[str, str]) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    (path / "tokenizer.json").write_text(tokenizer_jsons["byte_level"], encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def oracle(directory: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    found = load_tokenizer(TokenizerFiles(directory=directory), "auto")
    assert found is not None
    return found


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("prompted", [True, False])
def test_rendered_as_transformers_does(
    template: str, chat: list[dict[str, Any]], prompted: bool, tokenizer: Tokenizer, oracle: Any
) -> None:
    options: dict[str, Any] = {"chat_template": TEMPLATES[template], "add_generation_prompt": prompted}
    expected = oracle.apply_chat_template(chat, tokenize=False, **options)
    assert tokenizer.apply_chat_template(chat, **options) == expected


def test_tools_parts_calls_and_own_variables(tokenizer: Tokenizer, oracle: Any) -> None:
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": TOOL["function"]}]},
        {"role": "tool", "content": "1"},
    ]
    for options in ({"tools": [TOOL]}, {"thinking": True}, {}):
        given: dict[str, Any] = {"chat_template": TOOLS, "add_generation_prompt": True, **options}
        expected = oracle.apply_chat_template(chat, tokenize=False, **given)
        assert tokenizer.apply_chat_template(chat, **given) == expected


CALLED = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": TOOL["function"]}]},
    {"role": "assistant", "tool_calls": [{"function": TOOL["function"]}]},
    {"role": "tool", "content": "1"},
]


@pytest.mark.parametrize("read", ["m['content']", "m.content", "m.content | default('none')"])
def test_a_message_that_only_calls_has_empty_text_where_the_template_reads_any(read: str, tokenizer: Tokenizer) -> None:
    template = "{% for m in messages %}{{ '[' + " + read + " + ']' }}{% endfor %}"
    assert tokenizer.apply_chat_template(CALLED, chat_template=template) == "[a][][][1]"


@pytest.mark.parametrize(
    "asked",
    [
        "m.content is defined",
        "m['content'] is not undefined",
        "not m.content is undefined",
        "'content' in m",
        "'content' not in m",
    ],
)
def test_a_template_that_asks_for_content_sees_that_there_is_none(asked: str, tokenizer: Tokenizer) -> None:
    template = "{% for m in messages %}{{ 1 if " + asked + " else 0 }}{% endfor %}"
    expected = "0110" if "not in" in asked else "1001"
    assert tokenizer.apply_chat_template(CALLED, chat_template=template) == expected


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize("template", ["chatml", "llama2", "trimmed", "generation"])
def test_parts_become_text_for_templates_that_take_text(template: str, tokenizer: Tokenizer) -> None:
    options: dict[str, Any] = {"chat_template": TEMPLATES[template]}
    as_text = tokenizer.apply_chat_template([{"role": "user", "content": "a\nb"}], **options)
    assert tokenizer.apply_chat_template([{"role": "user", "content": PARTS}], **options) == as_text


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% set c = m['content'] %}{% for p in c %}<{{ p.text }}>{% endfor %}{% endfor %}",
        "{% macro show(x) %}{% for p in x %}<{{ p.text }}>{% endfor %}{% endmacro %}{{ show(messages[0].content) }}",
        "<{{ messages[0].content | map(attribute='text') | join('><') }}>",
        "<{{ messages[0].content[0].text }}><{{ messages[0]['content'][1]['text'] }}>",
    ],
)
def test_parts_stay_parts_for_templates_that_go_over_them(template: str, tokenizer: Tokenizer, oracle: Any) -> None:
    chat = [{"role": "user", "content": PARTS}]
    expected = oracle.apply_chat_template(chat, tokenize=False, chat_template=template)
    assert tokenizer.apply_chat_template(chat, chat_template=template) == expected == "<a><b>"


@pytest.mark.parametrize("template", ["chatml", "tools"])
def test_parts_that_are_no_text_are_refused(template: str, tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(RequestError, match="content part of type 'image_url'"):
        tokenizer.apply_chat_template(chat, chat_template=TEMPLATES[template])


@pytest.mark.parametrize("template", ["chatml", "trimmed", "generation"])
@pytest.mark.parametrize("ending", ["Two", "Two ", "Two\n\n", [{"type": "text", "text": "Two "}]])
def test_the_last_message_is_continued_as_transformers_does(
    template: str, ending: Any, tokenizer: Tokenizer, oracle: Any
) -> None:
    source = TEMPLATES[template] if isinstance(ending, str) else TOOLS
    chat = [{"role": "user", "content": "One"}, {"role": "assistant", "content": ending}]
    options: dict[str, Any] = {
        "chat_template": source,
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    expected = oracle.apply_chat_template(chat, tokenize=False, **options)
    assert tokenizer.apply_chat_template(chat, **options) == expected


@pytest.mark.parametrize(
    ("chat", "options", "message"),
    [
        ([], {}, "at least one message"),
        (CHATS[0], {"chat_template": None}, "has no chat template: give chat_template"),
        (CHATS[0], {"chat_template": "{% if %}"}, "is not valid Jinja"),
        ([{"role": "assistant", "content": "x"}], {"chat_template": LLAMA2}, "refused the messages: .*must alternate"),
        ([{"role": "user"}], {"chat_template": LLAMA2}, "refused the messages"),
        (CHATS[0], {"chat_template": "{{ ''.__class__.__mro__ }}"}, "refused the messages"),
        (CHATS[0], {"continue_final_message": True}, "exclude each other"),
        (
            CHATS[0],
            {"chat_template": "{{ 1 }}", "continue_final_message": True, "add_generation_prompt": False},
            "does not show the last message whole",
        ),
        (
            [{"role": "user", "content": None}],
            {"continue_final_message": True, "add_generation_prompt": False},
            "needs a last message with text",
        ),
    ],
)
def test_what_cannot_be_rendered_is_a_request_error(
    chat: list[dict[str, Any]], options: dict[str, Any], message: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(RequestError, match=message):
        tokenizer.apply_chat_template(chat, **{"chat_template": CHATML, **options})


def test_messages_are_left_as_they_were(tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]
    tokenizer.apply_chat_template(chat, chat_template=TOOLS, add_generation_prompt=False, continue_final_message=True)
    assert chat == [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]


def test_templates_are_found_where_checkpoints_keep_them(directory: Path, tmp_path: Path) -> None:
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())

    def rendered(**options: Any) -> str:
        tokenizer = load_tokenizer(TokenizerFiles(directory=tmp_path), "auto")
        assert tokenizer is not None
        return tokenizer.apply_chat_template([{"role": "user", "content": "x"}], **options)

    def write(template: Any) -> None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))

    write("inside")
    assert rendered() == "inside"
    write(
        [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools{% if tools %}{% endif %}"}]
    )
    assert (rendered(), rendered(tools=[TOOL]), rendered(chat_template="tool_use")) == ("plain", "tools", "tools")
    with pytest.raises(RequestError, match="tools would not reach the model, for the chat template does not"):
        rendered(tools=[TOOL], chat_template="default")
    write([{"name": "rag", "template": "r"}])
    with pytest.raises(RequestError, match="several chat templates and no default: give chat_template one of rag"):
        rendered()
    (tmp_path / "chat_template.jinja").write_text("beside")
    assert rendered() == "beside"


def test_the_template_of_a_gguf_file(byte_level: Tokenizer) -> None:
    text = byte_level.apply_chat_template([{"role": "user", "content": "the"}])
    assert text == "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n"
    assert byte_level.encode(text, add_special_tokens=False)[0] == byte_level.bos_token_id


THINKING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>{% endif %}"
)


@pytest.mark.parametrize(
    ("messages", "options", "tail"),
    [
        ([{"role": "user", "content": "<think>"}], {}, "[assistant]<think>"),
        ([{"role": "user", "content": "a"}], {"add_generation_prompt": False}, ""),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>b"}],
            {"add_generation_prompt": False, "continue_final_message": True},
            "[assistant]<think>b",
        ),
    ],
)
def test_the_tail_is_what_is_behind_the_last_whole_message(
    byte_level: Tokenizer, messages: Any, options: dict[str, Any], tail: str
) -> None:
    options = {**options, "chat_template": THINKING}
    text, _ = byte_level.chat_prompt(messages, **options)
    assert byte_level.chat_tail(text, messages, **options) == tail
