"""vLLM's names for its API server, as flags of `vllm serve` that are no fields of `EngineArgs`. As
`dovetail.vllm.settings`, this is data about another project's vocabulary."""

from __future__ import annotations

from dovetail.config.foreign_names import ForeignName, refused, works

_HEADERS = ("headers may have 64 KiB, in any number", "leave it out; a proxy can bound them further")

SERVER_NAMES: tuple[ForeignName, ...] = (
    works("host", "str", "server.host"),
    works("port", "int", "server.port"),
    works("uds", "str", "server.uds"),
    works("served_model_name", "strs", "server.served_model_name"),
    works("api_key", "strs", "server.api_keys"),
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
    refused("enable_ssl_refresh", "switch", "certificates are read at the start", "restart to read them again", False),
    refused(
        "middleware",
        "str",
        "what goes around all endpoints is the server's own",
        "put a proxy in front, or write endpoints as a route plugin",
    ),
    refused(
        "disable_frontend_multiprocessing",
        "switch",
        "engines of a server always run in a process of their own",
        "leave it out; LLM and AsyncLLMEngine run one in yours",
        False,
    ),
    refused(
        "enable_request_id_headers",
        "switch",
        "every response has the header x-request-id",
        "leave it out",
        True,
    ),
    refused("enable_prompt_tokens_details", "switch", "usage has the cached tokens always", "leave it out", True),
    refused("h11_max_incomplete_event_size", "int", *_HEADERS),
    refused("h11_max_header_count", "int", *_HEADERS),
    refused("max_log_len", "int", "no prompt is logged", "leave it out"),
    refused(
        "log_config_file", "str", "the server configures its own log", "set server.log_level and server.access_log"
    ),
    refused("enable_log_outputs", "switch", "no output is logged", "have your client keep them", False),
    refused(
        "enable_server_load_tracking",
        "switch",
        "the load is on /metrics always",
        "read vllm:num_requests_running and vllm:num_requests_waiting, and leave it out",
        False,
    ),
    works(
        "return_tokens_as_token_ids",
        "switch",
        "server.routes.completions.return_tokens_as_token_ids",
        "an option of the routes `completions` and `chat`",
        also=("server.routes.chat.return_tokens_as_token_ids",),
    ),
    works("chat_template", "str", "model.chat_template", "a file, or the template itself"),
    refused(
        "chat_template_content_format",
        "str",
        "the template itself says whether it takes parts or text",
        "leave it out",
        "auto",
    ),
    works(
        "trust_request_chat_template",
        "switch",
        "server.request_chat_templates",
        "on by default, since templates run in a sandbox that bounds them",
    ),
    works(
        "exclude_tools_when_tool_choice_none",
        "switch",
        "server.routes.chat.exclude_tools_when_tool_choice_none",
        "an option of the route `chat`",
    ),
    refused(
        "response_role",
        "str",
        "answers are the assistant's",
        "rename the role in your client, or leave it out",
        "assistant",
    ),
    refused(
        "enable_auto_tool_choice",
        "switch",
        "tools are served wherever the dialect has them",
        "leave it out; requests without calls say tool_choice none",
        True,
    ),
    works(
        "tool_call_parser",
        "str",
        "dialect.name",
        "any installed dialect; auto goes by the chat template",
        values={"qwen3_xml": "qwen3_coder", "deepseek_v3": "deepseek_r1"},
        refuses={"openai": "no dialect here writes Harmony; name one of `dovetail plugins list`"},
    ),
    refused(
        "tool_parser_plugin",
        "str",
        "vLLM's parser classes do not speak this contract",
        "derive from dovetail.contracts.dialect.Dialect and give tool_call_parser ./file.py:Class",
        "",
    ),
    works(
        "lora_modules",
        "strs",
        "lora.modules",
        "`NAME=PATH`, or JSON with `name`, `path` and `base_model_name`",
        entries={"path": "lora.modules", "base_model_name": "server.routes.models.parents"},
    ),
    refused("headless", "switch", "a server has its engine with it", "leave it out", False),
)
