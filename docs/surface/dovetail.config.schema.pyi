from functools import partial
from pydantic import BaseModel, Field, SecretStr
from typing import Any, Literal


class Section(BaseModel):
    ...


class ComponentSection(BaseModel):
    name: str = Field(default=AUTO, min_length=1)
    @property
    def options(self) -> dict[str, Any]: ...


class NamedSection(ComponentSection):
    name: str = Field(min_length=1)


class ModelSection(Section):
    path: str = Field(default_factory=partial(_installed_default, 'model.path'), min_length=1)
    revision: str | None = None
    tokenizer: str | None = None
    tokenizer_mode: Literal['auto', 'slow', 'mistral', 'none'] = 'auto'
    chat_template: str | None = Field(default=None, min_length=1)
    generation_config: str = Field(default=AUTO, min_length=1)
    override_generation_config: dict[str, Any] = Field(default_factory=dict)
    dtype: ModelDtype = 'auto'
    max_model_len: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0)
    max_logprobs: int = Field(default=20, ge=-1)
    logprobs_mode: Literal['raw_logprobs', 'processed_logprobs'] = 'raw_logprobs'
    max_completions: int = Field(default=1024, ge=1)
    hf_overrides: dict[str, Any] = Field(default_factory=dict)
    family: ComponentSection = ComponentSection()
    weight_format: ComponentSection = ComponentSection()
    source: ComponentSection = ComponentSection()
    quantization: ComponentSection | None = ComponentSection()
    packed_cache_gib: float = Field(default=2.0, ge=0)
    operators: ComponentSection | None = ComponentSection()


class CacheSection(Section):
    block_size: int = Field(default=16, ge=1)
    dtype: CacheDtype = 'auto'
    memory_gib: float | None = Field(default=None, gt=0)
    memory_fraction: float | None = Field(default=None, gt=0, le=1)
    num_blocks: int | None = Field(default=None, ge=2)
    prefix_caching: bool = True
    swap_gib: float = Field(default=0.0, ge=0)


class ExecutorSection(ComponentSection):
    tensor_parallel: int = Field(default=1, ge=1)
    pipeline_parallel: int = Field(default=1, ge=1)
    stage_layers: list[int] | None = None
    threads: int | None = Field(default=None, ge=1)
    enforce_eager: bool = False
    @property
    def num_ranks(self) -> int: ...


class SchedulerSection(ComponentSection):
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    max_num_seqs: int = Field(default=256, ge=1)
    enable_chunked_prefill: bool = True
    max_num_partial_prefills: int = Field(default=1, ge=1)
    max_long_partial_prefills: int = Field(default=1, ge=1)
    long_prefill_token_threshold: int | None = Field(default=None, ge=0)


class DrafterSection(NamedSection):
    num_tokens: int = Field(default=4, ge=1)
    length: str | NamedSection = Field(default_factory=partial(_installed_default, 'speculative.drafters.*.length'))
    min_confidence: float | None = Field(default=None, ge=0, le=1)
    attention: ComponentSection | None = None


class SpeculativeSection(Section):
    drafters: dict[Label, DrafterSection] = Field(min_length=1)
    default: str | None = 'auto'
    acceptance: ComponentSection = ComponentSection()
    rules: dict[Label, NamedSection] = Field(default_factory=dict)
    disable_by_batch_size: int | None = Field(default=None, ge=0)
    disable_logprobs: bool = False


class ArmSection(Section):
    speculation: str | None = None
    share: float = Field(default=1.0, gt=0)


class ExperimentSection(Section):
    arms: dict[Label, ArmSection] = Field(min_length=2)
    unit: Literal['request', 'user', 'slice'] = 'slice'
    slice_s: float = Field(default=60.0, gt=0)
    traffic: float = Field(default=1.0, gt=0, le=1)
    seed: int = Field(default=0, ge=0)


class LoRASection(Section):
    enabled: bool = False
    max_loras: int = Field(default=1, ge=1)
    max_rank: int = Field(default=16, ge=1, le=1024)
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'
    max_cpu_loras: int | None = Field(default=None, ge=1)
    modules: dict[str, str] = Field(default_factory=dict)


class GrammarSection(ComponentSection):
    source_bytes: int | None = Field(default=None, ge=1)
    compile_seconds: float | None = Field(default=None, gt=0)
    compile_gib: float | None = Field(default=None, gt=0)
    wait_seconds: float | None = Field(default=None, gt=0)
    read_ahead: bool | None = None


class KVConnectorSection(NamedSection):
    load_seconds: float | None = Field(default=None, gt=0)
    queue_gib: float | None = Field(default=None, gt=0)


class CORSSection(Section):
    allow_origins: list[str] = Field(default_factory=list)
    allow_methods: list[str] = ['*']
    allow_headers: list[str] = ['*']
    allow_credentials: bool = False


class TLSSection(Section):
    certfile: str = Field(min_length=1)
    keyfile: str | None = None
    ca_certs: str | None = None
    cert_reqs: Literal[0, 1, 2] = 0
    ciphers: str | None = None


class RestartSection(Section):
    policy: Literal['never', 'on_failure'] = 'on_failure'
    max_restarts: int = Field(default=3, ge=0)
    window_s: float = Field(default=300.0, gt=0)


class ServerSection(Section):
    host: str = Field(default='127.0.0.1', min_length=1)
    port: int = Field(default=8000, ge=0, le=65535)
    uds: str | None = None
    api_server_count: int = Field(default=1, ge=1)
    data_parallel_size: int = Field(default=1, ge=1)
    data_parallel_devices: list[str] = []
    router: ComponentSection = ComponentSection()
    retries: int = Field(default=2, ge=0)
    served_model_name: list[str] = Field(default_factory=list)
    api_keys: list[SecretStr] = Field(default_factory=list)
    routes: dict[Label, NamedSection | None] = Field(default_factory=dict, validate_default=True)
    root_path: str = Field(default='', pattern='^(/.*[^/])?$')
    docs: bool = True
    request_chat_templates: bool = True
    max_body_mib: float = Field(default=8.0, gt=0)
    header_timeout_s: float = Field(default=10.0, gt=0)
    body_timeout_s: float = Field(default=60.0, gt=0)
    keep_alive_timeout_s: float = Field(default=5.0, gt=0)
    max_num_waiting: int | None = Field(default=2048, ge=0)
    kept_requests: int = Field(default=1000, ge=0)
    request_timeout_s: float | None = Field(default=None, gt=0)
    drain_timeout_s: float = Field(default=30.0, ge=0)
    unhealthy_after_s: float = Field(default=300.0, gt=0)
    cors: CORSSection = CORSSection()
    tls: TLSSection | None = None
    restart: RestartSection = RestartSection()
    log_level: Literal['critical', 'error', 'warning', 'info', 'debug', 'trace'] = 'info'
    access_log: bool = True


class PoolingSection(Section):
    embed: ComponentSection | None = ComponentSection()
    normalize: bool | None = None
    token_embed: ComponentSection | None = ComponentSection()
    classify: ComponentSection | None = ComponentSection()
    token_classify: ComponentSection | None = ComponentSection()
