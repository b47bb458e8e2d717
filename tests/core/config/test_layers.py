"""Layers: which value wins, and where each came from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dovetail.config.load import load_config
from dovetail.config.schema import EngineConfig
from dovetail.contracts.errors import ConfigError

YAML = """\
model:
  path: ./tiny
  dtype: float32
scheduler:
  name: priority
  max_num_seqs: 8
attention: sdpa
"""


@pytest.fixture
def engine_yaml(tmp_path: Path) -> Path:
    path = tmp_path / "engine.yaml"
    path.write_text(YAML)
    return path


def test_without_any_layer_every_value_is_a_default():
    layered = load_config()
    assert layered.config == EngineConfig()
    assert {layered.origin(key) for key in layered.asked()} == {"default"}


def test_a_file_value_carries_its_line(engine_yaml: Path):
    layered = load_config(engine_yaml)
    assert layered.config.scheduler.max_num_seqs == 8
    assert layered.origin("scheduler.max_num_seqs") == "engine.yaml:6"
    assert layered.origin("attention.name") == "engine.yaml:7"
    assert layered.origin("cache.block_size") == "default"
    assert layered.base_dir("model.path") == engine_yaml.parent


def test_the_three_formats_read_the_same(tmp_path: Path):
    tree = {"model": {"dtype": "float32"}, "telemetry": ["log"], "cache": {"block_size": 8}}
    (tmp_path / "a.json").write_text(json.dumps(tree))
    (tmp_path / "a.yaml").write_text("model: {dtype: float32}\ntelemetry: [log]\ncache:\n  block_size: 8\n")
    (tmp_path / "a.toml").write_text('telemetry = ["log"]\n[model]\ndtype = "float32"\n[cache]\nblock_size = 8\n')
    configs = [load_config(tmp_path / f"a.{suffix}").config for suffix in ("json", "yaml", "toml")]
    assert configs[0] == configs[1] == configs[2] == load_config(tree).config


def test_overrides_outrank_the_file_and_remember_it(engine_yaml: Path):
    layered = load_config(engine_yaml, keywords={"dtype": "half"}, overrides=["scheduler.max_num_seqs=4"])
    assert layered.config.model.dtype == "float16"
    assert layered.origin("model.dtype") == "vLLM name dtype"
    assert layered.config.scheduler.max_num_seqs == 4
    assert layered.origins["scheduler", "max_num_seqs"].over == (("engine.yaml:6", 8),)
    assert layered.config.model.path == "./tiny"


def test_override_values_are_yaml():
    layered = load_config(
        overrides=["cache.prefix_caching=false", "model.max_model_len=null", "cache.swap_gib=1.5", "telemetry=[log]"]
    )
    assert layered.config.cache.prefix_caching is False
    assert layered.config.model.max_model_len is None
    assert layered.config.cache.swap_gib == 1.5
    assert [sink.name for sink in layered.config.telemetry] == ["log"]


def test_a_section_may_be_a_string_or_a_mapping():
    by_string = load_config(keywords={"model": "org/name", "attention": "sdpa"}).config
    by_mapping = load_config(keywords={"model": {"path": "org/name"}, "attention": {"name": "sdpa"}}).config
    assert by_string == by_mapping == EngineConfig(model={"path": "org/name"}, attention="sdpa")


def test_an_empty_section_is_its_default(tmp_path: Path):
    path = tmp_path / "engine.yaml"
    path.write_text("cache:\n  # block_size: 8\nspeculative:\n")
    assert load_config(path).config == EngineConfig()


def test_a_list_is_replaced_as_a_whole():
    layered = load_config({"telemetry": ["log", {"name": "jsonl", "path": "x"}]}, keywords={"telemetry": ["log"]})
    assert [sink.name for sink in layered.config.telemetry] == ["log"]
    assert layered.origin("telemetry.0.name") == "keyword"
    assert not [path for path in layered.origins if path[:2] == ("telemetry", "1")]


def test_options_of_a_replaced_plugin_leave_with_it():
    base = {"scheduler": {"name": "mine", "aging": 2, "max_num_seqs": 4}}
    layered = load_config(base, overrides=["scheduler.name=fcfs"])
    assert layered.config.scheduler.options == {}
    assert layered.config.scheduler.max_num_seqs == 4
    [dropped] = layered.dropped
    assert (dropped.path, dropped.value) == (("scheduler", "aging"), 2)
    assert "'mine'" in dropped.reason


def test_an_option_given_anew_is_not_dropped():
    base = {"scheduler": {"name": "mine", "aging": 2}}
    layered = load_config(base, keywords={"scheduler": {"name": "other", "aging": 3}})
    assert layered.config.scheduler.options == {"aging": 3}
    assert layered.dropped == ()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["a", {"name": "b", "size": 3}], {"a": ("a", {}), "b": ("b", {"size": 3})}),
        ("a", {"a": ("a", {})}),
        ({"a": {"size": 3}, "b": None, "c": "d"}, {"a": ("a", {"size": 3}), "b": ("b", {}), "c": ("d", {})}),
    ],
)
def test_a_logits_processor_is_found_by_its_plugins_name(given, expected):
    processors = load_config({"logits_processors": given}).config.logits_processors
    assert {key: (section.name, section.options) for key, section in processors.items()} == expected


def test_an_option_of_a_processor_leaves_its_name_alone():
    base = {"logits_processors": {"mine": {"name": "a"}}}
    layered = load_config(base, overrides=["logits_processors.mine.size=3"])
    assert layered.config.logits_processors["mine"].name == "a"


def test_null_switches_a_section_off():
    base = {"speculative": {"drafters": {"lookup": "ngram"}}}
    assert load_config(base, overrides=["speculative=null"]).config.speculative is None


@pytest.mark.parametrize(
    ("config", "keywords", "overrides", "message"),
    [
        ({"cache": {"blok_size": 8}}, {}, [], r"'cache.blok_size' \(config mapping\): did you mean 'block_size'"),
        ({"seed": 1}, {}, [], r"'seed' \(config mapping\): did you mean 'model.seed'"),
        ({}, {"max_model_length": 5}, [], "unknown keyword 'max_model_length': did you mean 'max_model_len'"),
        ({}, {}, ["cache.blocksize=8"], r"'cache.blocksize' \(-o\): did you mean 'block_size'"),
        ({}, {}, ["cache.block_size"], "write section.key=value"),
        ({}, {}, ["telemetry.0.name=log"], "telemetry is a list; give it whole"),
        ({"cache": {"block_size": "many"}}, {}, [], r"cache.block_size: .*'many' \(config mapping\)"),
        ({"cache": 8}, {}, [], "cache must be a mapping of keys, got 8"),
        ({"model": 5}, {}, [], r"model must be a string \(its path\) or a mapping of keys, got 5"),
        (5, {}, [], "config must be the path of a file, a mapping or an EngineConfig, got 5"),
        ({}, {"modle": "x"}, [], r"did you mean 'model'\?$"),
        ({"logits_processors": ["./f.py:C"]}, {}, [], "'./f.py:C' .* has no plain name"),
        ({"logits_processors": ["a", "a"]}, {}, [], "names 'a' twice"),
        ({"model": {"dtype": "int3"}}, {}, [], r"model.dtype: .*'int3' \(config mapping\)"),
        ({True: 1}, {}, [], "quote the key"),
        ({"speculative": {"drafters": {"a": {"num_tokens": 2}}}}, {}, [], "speculative.drafters.a.name is missing"),
        ({"speculative": {"drafters": {}}}, {}, [], "speculative.drafters: .*at least 1 item"),
        ({"speculative": {"drafters": {"a.b": "ngram"}}}, {}, [], "speculative.drafters.a.b: .*pattern"),
        ({"cache": {"memory_gib": float("inf")}}, {}, [], "cache.memory_gib: .*finite"),
    ],
)
def test_refused_with_key_and_origin(config, keywords, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(config, keywords=keywords, overrides=overrides)


def test_two_answers_of_equal_rank_are_refused():
    with pytest.raises(ConfigError, match=r"model.seed is given twice: vLLM name seed says 1, -o says 2; keep one"):
        load_config(keywords={"seed": 1}, overrides=["model.seed=2"])
    assert load_config(keywords={"seed": 1}, overrides=["model.seed=1"]).config.model.seed == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "model: {path: [", "malformed"),
        ("a.yaml", "cache: {block_size: 8}\ncache: {swap_gib: 1}\n", "line 2 gives cache a second time"),
        ("a.json", '{"cache": {"swap_gib": 1, "swap_gib": 2}}', "'swap_gib' stands twice"),
        ("a.toml", "cache = ", "malformed"),
        ("a.ini", "", "is no config file, whose name ends in .json, .toml, .yaml, .yml"),
        ("a.yaml", "- a\n", "the configuration must be a mapping"),
    ],
)
def test_unusable_files(tmp_path: Path, name: str, text: str, message: str):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_a_missing_file_says_where_it_was_looked_for(tmp_path: Path):
    with pytest.raises(ConfigError, match=f"does not exist .looked in {tmp_path}"):
        load_config(tmp_path / "none.yaml")


def test_yaml_merge_keys_are_not_duplicates(tmp_path: Path):
    path = tmp_path / "engine.yaml"
    text = "speculative:\n  drafters:\n    a: &a {name: ngram, num_tokens: 2}\n    b: {<<: *a, num_tokens: 3}\n"
    path.write_text(text)
    drafters = load_config(path).config.speculative.drafters
    assert (drafters["b"].name, drafters["b"].num_tokens) == ("ngram", 3)


def test_mappings_and_keywords_count_from_the_folder_that_is_given(tmp_path: Path):
    layered = load_config({"model": "./tiny"}, keywords={"attention": "sdpa"}, base_dir=tmp_path)
    assert layered.base_dir("model.path") == tmp_path
    layered = load_config({}, keywords={"model": {"path": "./tiny"}}, base_dir=tmp_path)
    assert layered.base_dir("model.path") == tmp_path
    assert load_config({"model": "./tiny"}).base_dir("model.path") == Path.cwd()
