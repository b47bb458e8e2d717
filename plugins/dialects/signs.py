"""Signs by which `auto` knows that a dialect is a model's own."""

from __future__ import annotations

from dovetail.contracts.dialect import Dialect, DialectNeed


def reasons_without(dialect: type[Dialect], need: DialectNeed, sign: str, *, but: tuple[str, ...] = ()) -> list[str]:
    """Why a model that nobody named the dialect for does not write it: neither its chat template has `sign` in it nor,
    where it has no template, its tokenizer; or the template has one of `but`, which belongs to another dialect."""
    if need.is_named:
        return []
    if need.chat_template is None:
        found = sign in need.special_tokens
        return [] if found else [f"{dialect.__name__} needs {sign}, and the model has neither it nor a chat template."]
    if sign not in need.chat_template:
        return [f"{dialect.__name__} needs {sign}, and the model's chat template does not write it."]
    return [
        f"{dialect.__name__} is not for models whose chat template writes {other}."
        for other in but
        if other in need.chat_template
    ]
