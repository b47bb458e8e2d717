from dataclasses import dataclass, field

DTYPE_BYTES: dict[str, int] = {'float64': 8, 'float32': 4, 'float16': 2, 'bfloat16': 2, 'float8_e4m3fn': 1, 'float8_e5m2': 1, 'int8': 1, 'uint8': 1}
SCALE_BYTES: dict[str, int] = {'int8': 2}

@dataclass(frozen=True, kw_only=True)
class KVSpec:
    num_kv_heads: int
    head_size: int
    dtype: str
    window: int | None = None
    def page_bytes(self, block_size: int) -> int: ...


@dataclass(frozen=True, kw_only=True)
class StateSpec:
    num_elements: int
    dtype: str
    def page_bytes(self, block_size: int) -> int: ...


@dataclass(frozen=True, kw_only=True)
class LatentSpec(KVSpec):
    latent_size: int
    rotary_size: int
    dtype: str
    num_kv_heads: int = field(init=False, default=1)
    head_size: int = field(init=False)
    window: int | None = field(init=False, default=None)
    def page_bytes(self, block_size: int) -> int: ...


@dataclass(frozen=True, kw_only=True)
class CrossSpec:
    num_kv_heads: int
    head_size: int
    dtype: str
    max_tokens: int
    def page_bytes(self, block_size: int) -> int: ...

LayerCache = KVSpec | StateSpec | LatentSpec | CrossSpec

@dataclass(frozen=True)
class KVGroup:
    group_id: int
    layer_ids: tuple[int, ...]
    window: int | None


@dataclass(frozen=True)
class ExtraTensors:
    owner: str
    group_id: int
    page_bytes: tuple[int, ...]


@dataclass(frozen=True)
class KVLayout:
    block_size: int
    groups: tuple[KVGroup, ...]
    page_bytes: int
    num_tensors: int
    extra_tensors: tuple[ExtraTensors, ...] = ()
    @property
    def block_bytes(self) -> int: ...
    @property
    def extra_bytes(self) -> int: ...
    def blocks_for(self, num_tokens: int) -> int: ...
