"""Tiny random models whose tokenizers and chat templates are those of real families."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from dovetail.testing.tiny_models import save_tiny_model, tiny_config

CHATML = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call a tool as <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content if m.content is defined else '' }}
{%- for call in m.tool_calls or [] %}{{ '\n<tool_call>\n' }}
{{- '{"name": ' + call.function.name | tojson + ', "arguments": ' + call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>
{% elif enable_thinking is defined %}<think>

</think>

{% endif %}{% endif %}"""

LLAMA3 = """\
{{ bos_token }}
{%- for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>

{% if loop.first and tools %}Answer with {"name": ..., "parameters": ...}.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- if m.tool_calls %}{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{
m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

MISTRAL = """\
{{ bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}{% if loop.last and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}{% for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids of calls have nine characters') }}{% endif %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}{% endfor %}{{ eos_token }}
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- else %}{{ m.content + eos_token }}{% endif %}
{%- endfor %}"""


@dataclass(frozen=True)
class Family:
    """What a family's models have in common."""

    template: str
    special: tuple[str, ...]
    """End of sequence first."""
    plain: tuple[str, ...] = ()
    """Added tokens that decoding does not skip."""


FAMILIES = {
    "hermes": Family(
        CHATML,
        ("<|im_end|>", "<|im_start|>", "<|endoftext|>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    ),
    "llama3_json": Family(
        LLAMA3,
        ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|eom_id|>"),
    ),
    "mistral": Family(
        MISTRAL,
        ("</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[TOOL_RESULTS]"),
    ),
}
MAX_LEN = 4096


def save_chat_model(directory: Path, family: Family) -> None:
    """A random Llama with a token for each byte and for each of the family's added texts."""
    added = [*family.special, *family.plain]
    vocabulary = [*added, *sorted(ByteLevel.alphabet())]
    config = tiny_config(
        "llama", vocab_size=len(vocabulary), eos_token_id=0, max_position_embeddings=MAX_LEN, num_hidden_layers=1
    )
    save_tiny_model(directory, config)
    (directory / "tokenizer.json").write_text(json.dumps(_tokenizer(vocabulary, added, len(family.special))))
    roles = {"eos_token": added[0], "bos_token": added[1], "chat_template": family.template}
    (directory / "tokenizer_config.json").write_text(json.dumps(roles))


def _tokenizer(vocabulary: Sequence[str], added: Sequence[str], num_special: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": index, "content": text, "special": index < num_special, **flags} for index, text in enumerate(added)
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {text: index for index, text in enumerate(vocabulary)}, "merges": []},
    }
