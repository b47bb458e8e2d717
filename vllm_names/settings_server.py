"""vLLM's names for its API server, as flags of `vllm serve` that are no fields of `EngineArgs`. As
`dovetail.vllm.settings`, this is data about another project's vocabulary."""

from __future__ import annotations

from dovetail.config.foreign_names import ForeignName, planned, refused, works

_ADAPTERS = "adapters are not loaded yet"

SERVER_NAMES: tuple[ForeignName, ...] = (
    works("host", "str", "server.host"),
    works("port", "int", "server.port"),
    works("uds", "str", "server.uds"),
    works("served_model_name", "str", "server.served_model_name", "one name; write several in the config"),
    works("api_key", "str", "server.api_keys", "one key; write several in the config"),
    works("api_server_count", "int", "server.api_server_count"),
    works("root_path", "str", "server.root_path"),
    works("allowed_origins", "json", "server.cors.allow_origins"),
    works("allowed_methods", "json", "server.cors.allow_methods"),
    works("allowed_headers", "json", "server.cors.allow_headers"),
    works("allow_credentials", "switch", "server.cors.allow_credentials"),
    works("ssl_certfile", "str", "server.tls.certfile"),
    works("ssl_keyfile", "str", "server.tls.keyfile"),
    works("ssl_ca_certs", "str", "server.tls.ca_certs"),
    works("ssl_cert_reqs", "int", "server.tls.cert_reqs"),
    works("ssl_ciphers", "str", "server.tls.ciphers"),
    works("uvicorn_log_level", "str", "server.log_level"),
    works("disable_uvicorn_access_log", "switch", "server.access_log", values={True: False, False: True}),
    works("disable_fastapi_docs", "switch", "server.docs", values={True: False, False: True}),
    refused("enable_ssl_refresh", "switch", "certificates are read at the start; restart to read them again", False),
    refused(
        "middleware",
        "str",
        "what goes around all endpoints is the server's own; put a proxy in front, or write endpoints as a route",
    ),
    refused(
        "disable_frontend_multiprocessing",
        "switch",
        "engines always run in a process of their own; leave it out",
        False,
    ),
    refused(
        "enable_request_id_headers",
        "switch",
        "a request's x-request-id is in the id of its response always; leave it out",
        False,
    ),
    refused("enable_prompt_tokens_details", "switch", "usage has the cached tokens always; leave it out", True, False),
    refused("h11_max_incomplete_event_size", "int", "headers may have 64 KiB, always; leave it out"),
    refused("h11_max_header_count", "int", "headers may have 64 KiB, in any number; leave it out"),
    refused("max_log_len", "int", "no prompt is logged; leave it out"),
    refused("log_config_file", "str", "write server.log_level and server.access_log in its place"),
    planned("enable_log_outputs", "switch", "no output is logged", False),
    planned("enable_server_load_tracking", "switch", "/metrics has the requests that run and wait", False),
    planned("return_tokens_as_token_ids", "switch", "requests may ask for ids as well: return_token_ids", False),
    refused(
        "chat_template",
        "str",
        "put it into the directory of model.tokenizer as chat_template.jinja; requests may bring their own too",
    ),
    refused("chat_template_content_format", "str", "the template itself says whether it takes parts or text", "auto"),
    refused("trust_request_chat_template", "switch", "templates run in a sandbox that bounds them", True, False),
    refused(
        "exclude_tools_when_tool_choice_none",
        "switch",
        "tools are shown to the model with tool_choice none as well, as OpenAI does; leave them out of the request",
        False,
    ),
    refused("response_role", "str", "answers are the assistant's", "assistant"),
    refused(
        "enable_auto_tool_choice",
        "switch",
        "tools are served wherever the dialect has them; leave it out",
        True,
        False,
    ),
    works(
        "tool_call_parser",
        "str",
        "dialect.name",
        "any installed dialect; auto goes by the chat template",
        values={"qwen3_xml": "qwen3_coder", "deepseek_v3": "deepseek_r1"},
    ),
    refused("tool_parser_plugin", "str", "write dialect.name: ./file.py:Class, a dialect", ""),
    planned("lora_modules", "str", _ADAPTERS),
    planned("headless", "switch", "a server has its engine with it", False),
)
