"""What clients do wrong: each gets an error that says so, and the engine is unharmed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

CheckError = Callable[..., dict[str, Any]]
JSON = {"content-type": "application/json"}


@pytest.fixture(autouse=True)
def the_engine_still_answers(nothing_is_held: None, client: httpx.Client) -> Iterator[None]:
    yield
    answer = client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 1, "temperature": 0})
    assert answer.json()["choices"][0]["text"] == " upon"


CASES: list[tuple[dict[str, Any], str | None]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 1}, "prompt"),
    ({"prompt": True}, "prompt"),
    ({"prompt": 1.5}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, None),
    ({"prompt": ["a", ""]}, None),
    ({"prompt": ["a", 1]}, "prompt.0"),
    ({"prompt": [1, "a"]}, "prompt.1"),
    ({"prompt": [1, [2]]}, "prompt.1"),
    ({"prompt": [None]}, "prompt.0"),
    ({"prompt": [1.5]}, "prompt.0"),
    ({"prompt": [[1, "a"]]}, "prompt.0.1"),
    ({"prompt": [[[1]]]}, "prompt.0.0"),
    ({"prompt": [[]]}, None),
    ({"prompt": [-1]}, None),
    ({"prompt": [10**6]}, None),
    ({"prompt": [2**80]}, None),
    ({"prompt": [1] * 256}, None),
    ({"prompt": "a b " * 400}, None),
    ({"prompt": ["a", "a b " * 400]}, None),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"prompt": ["a"] * 600, "n": 2, "temperature": 1}, "prompt"),
    ({"model": "other"}, "model"),
    ({"model": 1}, "model"),
    ({"model": ""}, "model"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 1.0}, "n"),
    ({"n": "2"}, "n"),
    ({"n": True}, "n"),
    ({"n": 2, "temperature": 0}, None),
    ({"n": 10**6, "temperature": 1}, None),
    ({"n": 2**70, "temperature": 1}, "n"),
    ({"best_of": 0, "temperature": 1}, "best_of"),
    ({"best_of": 1, "n": 2, "temperature": 1}, "best_of"),
    ({"best_of": "a"}, "best_of"),
    ({"best_of": 2, "stream": True, "temperature": 1}, "best_of"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 2**40}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
    ({"min_tokens": 1000, "max_tokens": 2000}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 1e300}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": -1}, "top_p"),
    ({"top_p": "a"}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"min_p": -0.5}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"seed": "a"}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": 1}, "stop"),
    ({"stop": [1]}, "stop.0"),
    ({"stop": [""]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop": [f"s{index}" for index in range(1025)]}, "stop"),
    ({"stop_token_ids": "a"}, "stop_token_ids"),
    ({"stop_token_ids": [1.5]}, "stop_token_ids.0"),
    ({"stop_token_ids": [-5]}, "stop_token_ids"),
    ({"stop_token_ids": [10**9]}, "stop_token_ids"),
    ({"bad_words": "word"}, "bad_words"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": [1]}, "bad_words.0"),
    ({"bad_words": ["a"] * 1025}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [10**9]}, "allowed_token_ids"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "b"}}, "logit_bias"),
    ({"logit_bias": {"1.5": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    *[({"logit_bias": {key: 1}}, "logit_bias") for key in ("1_0", " 1", "1 ", "+1", "\uff11", "01", "", "9" * 5000)],
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {str(index): 1 for index in range(10_000)}}, "logit_bias"),
    ({"logprobs": -2}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 10**7}, "logprobs"),
    ({"prompt_logprobs": -2}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"echo": 1}, "echo"),
    ({"echo": "yes"}, "echo"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"suffix": "the end"}, "suffix"),
    ({"suffix": 1}, "suffix"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"length_penalty": 0.5}, "length_penalty"),
    ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
    ({"speculation": "ngram"}, "speculation"),
    ({"speculation": 1}, "speculation"),
    ({"processors": {"nobody": 1}}, None),
    ({"processors": []}, "processors"),
    ({"extra": 1}, "extra"),
    ({"priority": 1}, "priority"),
    ({"priority": "high"}, "priority"),
    ({"cache_salt": 1}, "cache_salt"),
    ({"request_id": 1}, "request_id"),
    ({"temprature": 1}, "temprature"),
    ({"messages": []}, "messages"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_json"),
    ({"guided_json": {}, "structured_outputs": {"json": {}}}, "guided_json"),
    ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
]
"""Fields, and the one that the error names."""

STREAMED = [
    ({"stream": True, **fields}, param) for fields, param in CASES if not fields.keys() & {"stream", "stream_options"}
]


@pytest.mark.parametrize(("fields", "param"), [*CASES, *STREAMED])
def test_a_bad_field_is_refused_by_name(
    client: httpx.Client, check_error: CheckError, fields: dict[str, Any], param: str | None
) -> None:
    response = client.post("/v1/completions", json={"prompt": "Once", "temperature": 0, **fields})
    check_error(response, 404 if isinstance(fields.get("model"), str) else 400, param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"}",
        b"null",
        b"1",
        b'"Once"',
        b"[]",
        b'[{"prompt": "Once"}]',
        b'{"prompt": "Once"',
        b'{"prompt": "Once"} {}',
        b"{'prompt': 'Once'}",
        b'{"prompt": "Once",}',
        b'{"prompt": "Once", "temperature": NaN}',
        b'{"prompt": "Once", "temperature": Infinity}',
        b'{"prompt": "Once", "temperature": -Infinity}',
        b'{"prompt": "Once", "temperature": 1e999}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xc3\x28"}',
        b'{"\xff": 1}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00"}',
        b'{"prompt": "a\x00b"}',
        b'\xef\xbb\xbf{"prompt": "Once"}',
        '{"prompt": "Once"}'.encode("utf-16"),
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"max_tokens": 1}',
        b"\x00" * 100,
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/detokenize"])
def test_what_is_no_such_json_is_refused(client: httpx.Client, check_error: CheckError, path: str, body: bytes) -> None:
    check_error(client.post(path, content=body, headers=JSON), 400)


HALF = "a\\ud83eb"
HALVES = [
    (f'{{"prompt": "{HALF}"}}', "prompt"),
    (f'{{"prompt": ["Once", "{HALF}"]}}', "prompt.1"),
    (f'{{"prompt": "Once", "user": "{HALF}"}}', "user"),
    (f'{{"prompt": "Once", "stop": ["b", "{HALF}"], "stream": true}}', "stop.1"),
    (f'{{"prompt": "Once", "request_id": "{HALF}"}}', "request_id"),
    (f'{{"prompt": "Once", "extra": {{"a": {{"{HALF}": 1}}}}}}', "extra.a"),
    (f'{{"prompt": "Once", "{HALF}": 1}}', None),
    (f'{{"prompt": "Once", "extra": {{"a": {"[" * 300} 0, "{HALF}" {"]" * 300}}}}}', "extra.a" + ".0" * 299 + ".1"),
]
"""Bodies with half of a surrogate pair, and where it is."""


@pytest.mark.parametrize(("body", "param"), HALVES)
def test_half_a_character_is_refused_where_it_is(
    client: httpx.Client, check_error: CheckError, body: str, param: str | None
) -> None:
    error = check_error(client.post("/v1/completions", content=body, headers=JSON), 400, param)
    assert "half of a surrogate pair" in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/detokenize"])
def test_a_request_without_a_body_is_refused(client: httpx.Client, check_error: CheckError, path: str) -> None:
    """With neither content-length nor transfer-encoding: there is nothing to wait for."""
    request = client.build_request("POST", path, headers=JSON)
    del request.headers["content-length"]
    check_error(client.send(request), 400)


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_another_content_type_is_refused(client: httpx.Client, check_error: CheckError, kind: str | None) -> None:
    headers = {"content-type": kind} if kind is not None else {}
    error = check_error(client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers), 400)
    assert "application/json" in error["message"]


def test_a_charset_is_no_other_type(client: httpx.Client) -> None:
    headers = {"content-type": "application/json; charset=utf-8"}
    body = b'{"prompt": "Once", "max_tokens": 1}'
    assert client.post("/v1/completions", content=body, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, None),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "return_token_str": True}, "return_token_str"),
        ("/detokenize", {}, None),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
        ("/detokenize", {"tokens": [-1]}, None),
        ("/detokenize", {"tokens": [10**9]}, None),
        ("/detokenize", {"tokens": [1], "model": "other"}, "model"),
    ],
)
def test_bad_fields_of_tokenize(
    client: httpx.Client, check_error: CheckError, path: str, body: dict[str, Any], param: str | None
) -> None:
    check_error(client.post(path, json=body), 404 if param == "model" else 400, param)


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/completions/", "/v1/completion", "/health/", "/v1/models/other"])
def test_what_is_not_there_is_a_404(client: httpx.Client, check_error: CheckError, path: str) -> None:
    check_error(client.get(path), 404)


@pytest.mark.parametrize(("method", "path", "allowed"), [("GET", "/v1/completions", "POST"), ("PUT", "/health", "GET")])
def test_another_method_is_a_405_that_names_the_right_one(
    client: httpx.Client, check_error: CheckError, method: str, path: str, allowed: str
) -> None:
    response = client.request(method, path)
    assert response.headers["allow"] == allowed
    check_error(response, 405)


def test_one_refused_prompt_refuses_them_all(client: httpx.Client, check_error: CheckError) -> None:
    body = {"prompt": [[346], [346, 336], [999_999]], "stream": True, "max_tokens": 200}
    check_error(client.post("/v1/completions", json=body), 400)


def test_a_text_that_is_far_too_long_is_not_tokenized(client: httpx.Client, check_error: CheckError) -> None:
    """Its bytes say that it has too many tokens, unless all but the last are cut off."""
    body = {"prompt": "Once upon a time " * 50_000, "max_tokens": 1, "temperature": 0}
    error = check_error(client.post("/v1/completions", json=body), 400)
    assert "tokens or more" in error["message"]
    assert "max_model_len is 256" in error["message"]
    answer = client.post("/v1/completions", json={**body, "truncate_prompt_tokens": 5})
    assert answer.json()["usage"]["prompt_tokens"] == 5
