"""Ways to write flags that users of other projects know and click does not: `--flag true`, `--flag=false`, and several
values behind one flag."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from dovetail.config.foreign_names import foreign_names

_WORDS = {"true": True, "false": False}


def as_click_takes_them(command: Any, arguments: Sequence[str]) -> list[str]:
    """The arguments of a click command. Flags of other projects are rewritten: a switch with true or false becomes its
    one form or the other, a flag with several values is repeated for each.

    Several values are taken only behind the command's own argument (`serve MODEL --served-model-name a b`): in front
    of it nobody could tell where they end.
    """
    options = {name: option for option in command.params if option.name in foreign_names() for name in option.opts}
    return list(_rewritten(options, list(arguments)))


def _rewritten(options: dict[str, Any], words: list[str]) -> Iterator[str]:
    many = bool(words) and not words[0].startswith("-")
    while words:
        word = words.pop(0)
        if word == "--":
            yield from [word, *words]
            return
        flag, equals, value = word.partition("=")
        option = options.get(flag.replace("_", "-"))
        if option is not None and option.secondary_opts:
            if not equals and words and words[0].lower() in _WORDS:
                value = words.pop(0)
            yield _switched(option, value) if value.lower() in _WORDS else word
        elif option is not None and option.multiple and many and not equals:
            values = list(takewhile(lambda item: not item.startswith("-"), words))
            del words[: len(values)]
            yield from [part for item in values for part in (flag, item)] or [word]
        else:
            yield word


def _switched(option: Any, value: str) -> str:
    return str(option.opts[0] if _WORDS[value.lower()] else option.secondary_opts[0])
