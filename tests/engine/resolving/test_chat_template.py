"""`model.chat_template`: a file or the template itself, in place of all that the checkpoint has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.errors import ConfigError
from dovetail.engine.tokenization.load import load_tokenizer_of
from dovetail.plugins.weight_formats.safetensors import SafetensorsFormat
from tests.engine.resolving.test_dialect import TEMPLATES, write_tokenizer

OURS = "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if tools %}!{% endif %}"


@pytest.fixture
def checkpoint(make_model: Callable[..., Path]) -> Path:
    """With a template of its own, and another for tools."""
    directory = write_tokenizer(make_model(), TEMPLATES["mistral"])
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("tools [TOOL_CALLS]")
    return directory


def prompt(resolved: ResolvedConfig, **options: Any) -> str:
    model = resolved.model
    tokenizer = load_tokenizer_of(
        SafetensorsFormat(SafetensorsFormat.Options()), model.files, "auto", None, model.chat_template
    )
    assert tokenizer is not None
    text: str = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], **options)
    return text


def test_a_template_is_given_itself(checkpoint: Path, resolve_tiny: Callable[..., ResolvedConfig]) -> None:
    resolved = resolve_tiny(model={"path": str(checkpoint), "chat_template": OURS})
    assert prompt(resolved) == "<a>"
    assert prompt(resolved, tools=[{"type": "function"}]) == "<a>!"
    assert prompt(resolve_tiny(model=str(checkpoint))).startswith("[INST]a")


def test_a_path_counts_from_the_file_that_gives_it(
    checkpoint: Path, tmp_path: Path, resolve_tiny: Callable[..., ResolvedConfig]
) -> None:
    (tmp_path / "ours.jinja").write_text(OURS)
    config = tmp_path / "engine.yaml"
    config.write_text(f"model: {{path: {checkpoint}, chat_template: ours.jinja}}")
    resolved = resolve_tiny(config)
    assert prompt(resolved) == "<a>"
    assert resolved.values["model"]["chat_template"] == str(tmp_path / "ours.jinja")


def test_the_dialect_goes_by_it(checkpoint: Path, resolve_tiny: Callable[..., ResolvedConfig]) -> None:
    given = {"path": str(checkpoint), "chat_template": TEMPLATES["qwen3_coder"]}
    assert resolve_tiny(model=str(checkpoint)).dialect.name == "mistral"
    assert resolve_tiny(model=given).dialect.name == "qwen3_coder"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"chat_template": "absent.jinja"}, "chat_template 'absent.jinja' .*give the path of a file, or the template"),
        ({"chat_template": "{% for %}"}, "chat_template .*not valid Jinja"),
        ({"chat_template": OURS, "tokenizer_mode": "none"}, "tokenizer_mode none reads no templates"),
    ],
)
def test_what_is_no_template_is_refused(
    checkpoint: Path, resolve_tiny: Callable[..., ResolvedConfig], keys: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_tiny(model={"path": str(checkpoint), **keys})
