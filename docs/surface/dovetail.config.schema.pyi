from functools import partial
from pydantic import BaseModel, Field
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
    dtype: ModelDtype = 'auto'
    max_model_len: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0)
    max_logprobs: int = Field(default=20, ge=-1)
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
    threads: int | None = Field(default=None, ge=1)
    enforce_eager: bool = False


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
    disable_by_batch_size: int | None = Field(default=None, ge=0)
    disable_logprobs: bool = False


class GrammarSection(ComponentSection):
    source_bytes: int | None = Field(default=None, ge=1)
    compile_seconds: float | None = Field(default=None, gt=0)
    compile_gib: float | None = Field(default=None, gt=0)
