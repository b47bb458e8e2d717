"""Config and experiment files that would hang, or fail in a way that says nothing."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail.config.load import load_config
from dovetail.contracts.errors import ConfigError
from dovetail.spec_decode.experiments.schema import read_experiment

LEVELS = [f"k{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 10)]
MERGES = [f"k{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 9)}]}}" for level in range(1, 10)]

HOSTILE = {
    "nine levels of nine aliases": ("yaml", "\n".join(["k0: &a0 [x]", *LEVELS]), "more than 100000 values"),
    "merged aliases": ("yaml", "\n".join(["k0: &a0 {x: 1}", *MERGES]), "more than 100000 values"),
    "an alias of itself": ("yaml", "a: &a [*a]", "nested more than 64 levels"),
    "deep yaml": ("yaml", "a: " + "[" * 5000 + "]" * 5000, "nested more than 64 levels"),
    "deep json": ("json", '{"a": ' + "[" * 50_000 + "]" * 50_000 + "}", "nested more than 64 levels"),
    "json of 100 levels": ("json", '{"a": ' + "[" * 100 + "]" * 100 + "}", "nested more than 64 levels"),
    "deep toml": ("toml", "a = " + "[" * 5000 + "]" * 5000, "nested more than 64 levels"),
    "an int that is none": ("yaml", "b: 1\na: !!int x", "line 2: 'x' is no int: invalid literal for int"),
    "a date that is none": ("yaml", "a: !!timestamp x", "line 1: 'x' is no timestamp$"),
    "a month that is none": ("yaml", "a: 2024-99-99", "line 1: '2024-99-99' is no timestamp: month must be in"),
    "a truth that is none": ("yaml", "a: !!bool x", "line 1: 'x' is no bool$"),
    "a long int in yaml": ("yaml", "a: " + "9" * 5000, "malformed: .*digits"),
    "a long int in json": ("json", '{"a": ' + "9" * 5000 + "}", "malformed: .*digits"),
    "a long int in toml": ("toml", "a = " + "9" * 5000, "malformed: .*digits"),
    "a long file": ("json", " " * (2**22 + 1), "more than 4194304 characters"),
}


READERS = {"config": load_config, "experiment": read_experiment}
each_reader = pytest.mark.parametrize("kind", READERS)


@each_reader
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_with_words(name: str, kind: str, tmp_path: Path) -> None:
    suffix, text, words = HOSTILE[name]
    path = tmp_path / f"engine.{suffix}"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"^{kind} file {path} .*{words}"):
        READERS[kind](path)


@each_reader
@pytest.mark.parametrize("suffix", ["yaml", "json", "toml"])
def test_a_pipe_is_not_waited_for(suffix: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"engine.{suffix}"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=f"^{kind} file .* is no regular file"):
        READERS[kind](path)


@pytest.mark.parametrize("value", ["!!int x", "[" * 3000, "9" * 5000, "{a: &a [*a]}"])
def test_a_hostile_override_is_refused_with_words(value: str) -> None:
    with pytest.raises(ConfigError, match="the value is not YAML"):
        load_config(None, overrides=[f"model.path={value}"])


@pytest.mark.parametrize("text", ["", " ", "null", "~"])
def test_an_override_may_be_null(text: str) -> None:
    assert load_config(None, overrides=[f"speculative={text}"]).config.speculative is None


def test_aliases_and_merges_still_work(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("model: &m {path: ./a, dtype: float32}\ncache: {block_size: 8}\n")
    assert load_config(path).config.model.dtype == "float32"


YAML = st.text("a:-[]{},&*!<>|?#'\"% \n\t0x.e~", max_size=40)
PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["model", "cache", "path", "name", "scheduler", "x"]), inner, max_size=3),
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.one_of(YAML, PLAIN.map(json.dumps)))
def test_any_text_is_a_configuration_or_refused(tmp_path: Path, text: str) -> None:
    for suffix in ("yaml", "json", "toml"):
        path = tmp_path / f"engine.{suffix}"
        path.write_text(text, encoding="utf-8")
        for read in READERS.values():
            with contextlib.suppress(ConfigError):
                read(path)
