"""Makes the tokenizer of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from dovetail.contracts.errors import ConfigError, ModelError
from dovetail.contracts.weights import ModelFiles, TokenizerFiles, WeightFormat
from dovetail.engine.tokenization.directory import TokenizerSettings, read_settings, read_text
from dovetail.engine.tokenization.form import TokenizerForm
from dovetail.engine.tokenization.sentencepiece_file import convert
from dovetail.engine.tokenization.tokenizer import FastTokenizer, Tokenizer

_MODES = ("auto", "slow", "mistral", "none")


def load_tokenizer_of(
    weight_format: WeightFormat,
    files: ModelFiles,
    mode: str,
    override_directory: str | None = None,
    chat_template: str | None = None,
) -> Tokenizer | None:
    """`load_tokenizer` of a model. The format is asked only where its tokenizer is used: building it may cost time and
    memory, and it may be the one that cannot be built. `chat_template`: in place of all that the checkpoint has."""
    is_used = mode != "none" and override_directory is None
    tokenizer = load_tokenizer(weight_format.tokenizer(files) if is_used else None, mode, override_directory)
    if tokenizer is not None and chat_template is not None:
        tokenizer.chat_templates = {"default": chat_template}
    return tokenizer


def load_tokenizer(files: TokenizerFiles | None, mode: str, override_directory: str | None = None) -> Tokenizer | None:
    """The tokenizer of `files`, or of `override_directory` where that is given.

    Mode "auto" takes the `tokenizers` library, "slow" the class of Hugging Face transformers, "mistral" the library
    mistral-common, and "none" gives None: token ids in and out. Raises `ModelError` where there is no tokenizer or it
    cannot be read.
    """
    if mode not in _MODES:
        raise ConfigError(f"model.tokenizer_mode must be one of {', '.join(_MODES)}, got {mode!r}")
    if mode == "none":
        return None
    if override_directory is not None:
        directory = Path(override_directory).expanduser()
        if not directory.is_dir():
            raise ModelError(f"model.tokenizer: {directory} is not a directory")
        files = TokenizerFiles(directory=directory)
    if files is None:
        raise ModelError(
            "the model has no tokenizer: give model.tokenizer a directory that has one, or set model.tokenizer_mode to "
            "none and send token ids"
        )
    if files.tokenizer_json is not None:
        if mode in ("slow", "mistral"):
            raise ModelError(
                f"tokenizer_mode {mode} needs a directory with tokenizer files, and this model's tokenizer is part of "
                "its weight file: use auto, or give model.tokenizer"
            )
        return _from_json(files, files.tokenizer_json)
    if files.directory is None:
        raise ModelError("the weight format gave neither a tokenizer's directory nor its JSON")
    return _from_directory(files, files.directory, mode)


def tokenizer_from_form(form: TokenizerForm) -> Tokenizer:
    """The same tokenizer in another process. Raises `ModelError`."""
    if form.json is not None:
        backend = _parse(form.json, "the tokenizer of the engine")
        return FastTokenizer(backend, form.json, form.special_tokens, form.chat_templates, form.first_token)
    if form.mode == "mistral":
        from dovetail.engine.tokenization.mistral import load_with_mistral_common

        return load_with_mistral_common(form.path)
    from dovetail.engine.tokenization.slow import load_with_transformers

    return load_with_transformers(form.path, form.special_tokens, form.chat_templates, keep_class=True)


def _from_json(files: TokenizerFiles, source: str) -> Tokenizer:
    backend = _parse(source, "the tokenizer in the model's metadata")
    ids = {"bos_token": files.bos_token_id, "eos_token": files.eos_token_id}
    special = {role: backend.id_to_token(token) for role, token in ids.items() if token is not None}
    return FastTokenizer(
        backend,
        source,
        special_tokens={role: text for role, text in special.items() if text is not None},
        chat_templates=_templates(files, {}),
        first_token=files.bos_token_id if files.add_bos_token else None,
    )


def _from_directory(files: TokenizerFiles, directory: Path, mode: str) -> Tokenizer:
    if mode == "mistral":
        # An optional package.
        from dovetail.engine.tokenization.mistral import load_with_mistral_common

        return load_with_mistral_common(directory)
    settings = read_settings(directory)
    templates = _templates(files, settings.chat_templates)
    path = directory / "tokenizer.json"
    if mode == "auto" and path.exists():
        source = read_text(path)
        backend = _parse(source, str(path))
        marked = _mark_special(backend, settings, source)
        return FastTokenizer(backend, marked, settings.special_tokens, templates)
    if mode == "auto" and (converted := convert(directory)) is not None:
        backend = _parse(converted.json, str(directory / "tokenizer.model"))
        marked = _mark_special(backend, settings, converted.json)
        special = {**converted.special_tokens, **settings.special_tokens}
        return FastTokenizer(backend, marked, special, templates)
    # transformers takes seconds to import: only for what nothing else reads.
    from dovetail.engine.tokenization.slow import load_with_transformers

    return load_with_transformers(directory, settings.special_tokens, templates, keep_class=mode == "slow")


def _parse(source: str, what: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(source)
    except Exception as error:
        # The library raises bare Exception for whatever is wrong with the JSON.
        raise ModelError(f"{what} cannot be read: {error}") from error


def _templates(files: TokenizerFiles, own: dict[str, str]) -> dict[str, str]:
    return own if files.chat_template is None else {**own, "default": files.chat_template}


def _mark_special(backend: tokenizers.Tokenizer, settings: TokenizerSettings, source: str) -> str:
    """Makes special what tokenizer_config.json calls so and tokenizer.json does not, as transformers does. Returns the
    JSON with these marks: `source` where it has them all."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    named = [*settings.special_tokens.values(), *settings.extra_special]
    unmarked = [text for text in named if text not in special and backend.token_to_id(text) is not None]
    if not unmarked:
        return source
    backend.add_special_tokens(unmarked)
    marked: str = backend.to_str()
    return marked
