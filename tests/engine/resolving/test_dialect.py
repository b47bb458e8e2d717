"""How `dialect` is chosen, and how it reaches clients."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.dialect import DialectRequest, Tool
from dovetail.contracts.engine_client import EngineFacts, GrammarFacts
from dovetail.contracts.errors import ConfigError, RequestError
from dovetail.engine.dialects import create_dialect
from dovetail.engine.facts import engine_facts
from dovetail.engine.tokenization.load import load_tokenizer_of
from dovetail.plugins.dialects.mistral import MistralDialect
from dovetail.plugins.weight_formats.safetensors import SafetensorsFormat
from dovetail.registry.registry import Registry
from dovetail.schedulers.fcfs import FCFSScheduler

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TEMPLATES = {
    "hermes": CHATML + "{% if tools %}<tool_call>{% endif %}",
    "qwen3_coder": CHATML + "{% if tools %}<tool_call><function=f>{% endif %}",
    "mistral": "{% for m in messages %}[INST]{{ m.content }}[/INST][TOOL_CALLS]{% endfor %}",
    "llama3_json": '{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{% endfor %} "parameters"',
    "plain": CHATML,
}
ADDED = ["<s>", "</s>", "[TOOL_CALLS]", "[ARGS]"]


def write_tokenizer(directory: Path, template: str | None) -> Path:
    added = [{"id": i, "content": text, "special": True} for i, text in enumerate(ADDED)]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "added_tokens": [{**token, **flags} for token in added],
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {text: i for i, text in enumerate(ADDED)}, "merges": []},
    }
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {} if template is None else {"chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("name", TEMPLATES)
def test_auto_goes_by_the_template(
    name: str, make_model: Callable[..., Path], resolve_tiny: Callable[..., ResolvedConfig], decision: Any
) -> None:
    directory = write_tokenizer(make_model(), TEMPLATES[name])
    resolved = resolve_tiny(model=str(directory))
    assert resolved.dialect.name == name
    answers = dict(decision(resolved, "dialect.name").candidates)
    assert answers[name] == ()
    assert all(answers[other] for other in answers if other not in (name, "plain"))


def test_without_a_template_auto_goes_by_the_tokens(
    make_model: Callable[..., Path], resolve_tiny: Callable[..., ResolvedConfig]
) -> None:
    assert resolve_tiny(model=str(write_tokenizer(make_model(), None))).dialect.name == "mistral"


def test_another_tokenizer_has_a_template_of_its_own(
    make_model: Callable[..., Path], tmp_path: Path, resolve_tiny: Callable[..., ResolvedConfig]
) -> None:
    model = write_tokenizer(make_model(), TEMPLATES["plain"])
    other = write_tokenizer(tmp_path / "other", TEMPLATES["hermes"])
    assert resolve_tiny(model={"path": str(model), "tokenizer": str(other)}).dialect.name == "hermes"


def test_a_dialect_that_is_named_serves_any_model(resolve_tiny: Callable[..., ResolvedConfig]) -> None:
    resolved = resolve_tiny(dialect={"name": "mistral", "form": "list"})
    assert (resolved.dialect.name, resolved.dialect.options) == ("mistral", {"form": "list"})


def test_an_unknown_option_is_refused(resolve_tiny: Callable[..., ResolvedConfig]) -> None:
    with pytest.raises(ConfigError, match="forms"):
        resolve_tiny(dialect={"name": "mistral", "forms": "list"})


def test_clients_create_the_dialect_from_plain_data(
    make_model: Callable[..., Path], resolve_tiny: Callable[..., ResolvedConfig]
) -> None:
    directory = write_tokenizer(make_model(), TEMPLATES["mistral"])
    resolved = resolve_tiny(model=str(directory), dialect={"name": "mistral", "form": "list"})
    format_ = SafetensorsFormat(SafetensorsFormat.Options())
    tokenizer = load_tokenizer_of(format_, resolved.model.files, "auto")
    facts = engine_facts(resolved, FCFSScheduler, None, tokenizer, GrammarFacts())
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(facts), type=EngineFacts)
    dialect = create_dialect(travelled)
    assert isinstance(dialect, MistralDialect)
    assert dialect.options.form == "list"
    assert dialect.setup.special_tokens == {text: index for index, text in enumerate(ADDED)}
    assert dialect.kept_tokens == {"[TOOL_CALLS]", "[ARGS]"}


def test_an_engine_without_a_tokenizer_has_no_dialect(resolve_tiny: Callable[..., ResolvedConfig]) -> None:
    assert create_dialect(engine_facts(resolve_tiny(), FCFSScheduler, None, None, GrammarFacts())) is None


@pytest.mark.parametrize("asked", [None, {"name": "auto"}], ids=["null", "none can be used"])
def test_an_engine_does_without_a_dialect(
    asked: Any, resolve_tiny: Callable[..., ResolvedConfig], decision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if asked is not None:
        refuse = classmethod(lambda cls, need, options, environment: ["it is not wanted"])
        for entry in (registry := Registry.scan()).entries("dialect"):
            monkeypatch.setattr(registry.load_entry(entry), "check", refuse)
    resolved = resolve_tiny(dialect=asked)
    assert resolved.dialect is None
    assert resolved.values["dialect"] is None
    assert "dialect" not in resolved.components_by_path()
    if asked is not None:
        assert dict(decision(resolved, "dialect.name").candidates)["plain"] == ("it is not wanted",)


def test_messages_call_a_dialect_by_its_name_in_the_config(
    make_model: Callable[..., Path], resolve_tiny: Callable[..., ResolvedConfig]
) -> None:
    resolved = resolve_tiny(model=str(write_tokenizer(make_model(), TEMPLATES["plain"])))
    tokenizer = load_tokenizer_of(SafetensorsFormat(SafetensorsFormat.Options()), resolved.model.files, "auto")
    dialect = create_dialect(engine_facts(resolved, FCFSScheduler, None, tokenizer, GrammarFacts()))
    assert dialect is not None
    with pytest.raises(RequestError, match=r"^dialect plain has no tool calls"):
        dialect.validate(DialectRequest(tools=(Tool(name="a"),)))
