"""Chat templates in the shapes of known ones, and a small byte-level BPE tokenizer with all their special tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import jinja2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

Message = Mapping[str, str]

_TRAINED_ON = (
    "The model answers the user. The user asks the model: what is the answer? I think that the answer is 42, "
    "because 6 times 7 is 42.\nThinking about it again, the answer is still 42.  \n user assistant system tool model "
) * 3
_SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "[INST]", "[/INST]", "<bos>", "<start_of_turn>", "<end_of_turn>", "<|system|>", "<|user|>",
    "<|assistant|>", "<|tool|>", "<|end|>", "<|User|>", "<|Assistant|>", "<|endoftext|>",
)  # fmt: skip


@dataclass(frozen=True)
class ChatTemplate:
    """One template and the token that ends a model's turn under it."""

    name: str
    eos: str
    source: str

    def render(self, messages: Sequence[Message], *, for_answer: bool = True) -> str:
        """The conversation as text; `for_answer`: with the start of the next answer."""
        return compiled(self.source).render(messages=messages, add_generation_prompt=for_answer)

    def token_ids(self, messages: Sequence[Message], *, for_answer: bool = True) -> list[int]:
        """The same in tokens."""
        return encode(self.render(messages, for_answer=for_answer))

    @property
    def eos_token_id(self) -> int:
        """Of `eos`."""
        return int(tokenizer().token_to_id(self.eos))


@cache
def compiled(source: str) -> jinja2.Template:
    """As transformers compiles chat templates."""
    return jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(source.replace("\n", ""))


@cache
def tokenizer() -> Tokenizer:
    """Byte-level BPE of some 150 merges, so that one text has many splits."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [_TRAINED_ON],
        trainers.BpeTrainer(
            vocab_size=430, special_tokens=list(_SPECIAL), initial_alphabet=alphabet, show_progress=False
        ),
    )
    return made


def encode(text: str) -> list[int]:
    """Canonical tokens of a text, special tokens recognized."""
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def decode(token_ids: Sequence[int]) -> str:
    """The text, special tokens shown."""
    return str(tokenizer().decode(list(token_ids), skip_special_tokens=False))


def _roles(before: str, between: str, after: str, answer: str, content: str = "message['content']") -> str:
    """A template that writes each message between two texts."""
    return (
        "{% for message in messages %}"
        f"{{{{ {before!r} + message['role'] + {between!r} + {content} + {after!r} }}}}"
        "{% endfor %}"
        f"{{% if add_generation_prompt %}}{{{{ {answer!r} }}}}{{% endif %}}"
    )


CHATML = ChatTemplate("chatml", "<|im_end|>", _roles("<|im_start|>", "\n", "<|im_end|>\n", "<|im_start|>assistant\n"))
LLAMA3 = ChatTemplate(
    "llama3",
    "<|eot_id|>",
    "{{ '<|begin_of_text|>' }}"
    + _roles(
        "<|start_header_id|>",
        "<|end_header_id|>\n\n",
        "<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
)
# An EOS behind answers only, and no start of an answer: the model begins with its space.
MISTRAL = ChatTemplate(
    "mistral",
    "</s>",
    "{{ '<s>' }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] + '</s>' }}"
    "{% else %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}{% endfor %}",
)
GEMMA = ChatTemplate(
    "gemma",
    "<end_of_turn>",
    "{{ '<bos>' }}{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + message['content'] + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}",
)
PHI = ChatTemplate("phi", "<|end|>", _roles("<|", "|>\n", "<|end|>\n", "<|assistant|>\n"))
ZEPHYR = ChatTemplate("zephyr", "</s>", _roles("<|", "|>\n", "</s>\n", "<|assistant|>\n"))
# Reasoning of earlier answers is left out, as soon as they are part of a prompt.
DEEPSEEK = ChatTemplate(
    "deepseek",
    "<|end|>",
    "{{ '<s>' }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|Assistant|>' + message['content'].split('</think>')[-1] + '<|end|>' }}"
    "{% else %}{{ '<|User|>' + message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}",
)
# Reasoning is left out once another message of the user follows, as Qwen3 does.
LATE_STRIPPING = ChatTemplate(
    "late_stripping",
    "<|im_end|>",
    "{% set ns = namespace(last=-1) %}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}"
    "{% set text = message['content'] if loop.index0 > ns.last else message['content'].split('</think>')[-1] %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + text + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
)
WITHOUT_EOS = ChatTemplate("without_eos", "</s>", _roles("### ", ":\n", "\n\n", "### assistant:\n"))
# An EOS behind the user's messages, none behind answers.
EOS_OF_USERS = ChatTemplate(
    "eos_of_users",
    "</s>",
    "{% for message in messages %}"
    "{{ message['role'] + ': ' + message['content'] + ('\\n' if message['role'] == 'assistant' else '</s>') }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
)
TRIMMING = ChatTemplate(
    "trimming",
    "<|im_end|>",
    _roles("<|im_start|>", "\n", "<|im_end|>\n", "<|im_start|>assistant\n", "message['content'] | trim"),
)
COUNTING = ChatTemplate(
    "counting",
    "<|im_end|>",
    "{{ '<|im_start|>system\\nMessage ' + messages | length | string + '<|im_end|>\\n' }}" + CHATML.source,
)
# A message of the system's once the conversation is long: one turn more than the model saw.
REMINDING = ChatTemplate(
    "reminding",
    "<|im_end|>",
    "{% if messages | length > 3 %}{{ '<|im_start|>system\\nBe short.<|im_end|>\\n' }}{% endif %}" + CHATML.source,
)
# Only the newest messages.
FORGETTING = ChatTemplate("forgetting", "<|im_end|>", "{% set messages = messages[-3:] %}" + CHATML.source)

TEMPLATES = (
    CHATML, LLAMA3, MISTRAL, GEMMA, PHI, ZEPHYR, DEEPSEEK, LATE_STRIPPING, WITHOUT_EOS, EOS_OF_USERS, TRIMMING,
    COUNTING, REMINDING, FORGETTING,
)  # fmt: skip
