"""The configured model as far as it is known without its weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import cast

from dovetail.commands import Explanation, ResolvedConfig, create_class
from dovetail.contracts.errors import ConfigError, DovetailError
from dovetail.contracts.kv import DTYPE_BYTES
from dovetail.contracts.model import ModelFamily
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import Environment
from dovetail.contracts.quantization import QuantizationMethod
from dovetail.contracts.weights import TensorInfo, WeightFormat
from dovetail.nn.layer_plan import bytes_held, plan_layers
from dovetail.plugins.commands.doctor.facts import Alternative, Measured, Model, Traffic
from dovetail.plugins.commands.doctor.traffic import operations_per_token, traffic_of

_METHODS = "dovetail.quantization.v1"


def examine_model(
    explanation: Explanation, environment: Environment, measured: Measured, context: int | None = None
) -> Model:
    """Counts what one token reads after `context` tokens; None: as many as the processor prefills in a moment."""
    resolved, estimate = explanation.resolved, explanation.estimate
    if resolved is None or estimate is None:
        raise explanation.refusal or ConfigError("the configuration could not be resolved")
    ranks = resolved.tensor_parallel
    weight_bytes = ranks * (sum(stage.weight_bytes for stage in estimate.stages) or estimate.weight_bytes)
    longest = resolved.model.max_model_len
    counter = _create_counter(resolved)
    operations = 2 * estimate.num_parameters if counter is None else operations_per_token(counter.plan)
    if context is None:
        rate = measured.product_rate(resolved.model.dtype)
        context = prompt_length(None if rate is None else rate / operations, longest)
    context = min(context, longest - 1)
    if counter is None:
        of_stages = sum(stage.kv_bytes_per_token for stage in estimate.stages)
        kv_bytes = (of_stages or estimate.kv_bytes_per_token) * ranks * context
        traffic = Traffic(weight_bytes, kv_bytes, context, is_exact=False)
    else:
        traffic = counter.current(context)
    threads = resolved.num_threads
    return Model(
        reference=resolved.model.files.reference,
        family=resolved.model_family.name,
        device=resolved.device_type,
        dtype=resolved.model.dtype,
        quantization=resolved.quantization.name if resolved.quantization is not None else None,
        executor=resolved.executor.name,
        tensor_parallel=ranks,
        threads=_threads(explanation),
        threads_asked=threads,
        threads_origin=_asked_by(explanation, "executor.threads") if threads is not None else "",
        max_model_len=longest,
        num_parameters=estimate.num_parameters,
        weight_bytes=weight_bytes,
        kv_memory=estimate.kv_bytes,
        operations_per_token=operations,
        traffic=traffic,
        alternatives=() if counter is None else tuple(counter.alternatives(environment, context)),
    )


def prompt_length(prefill_rate: float | None, longest: int, seconds: float = 2.0) -> int:
    """Tokens of a prompt that take about `seconds` at the best rate: enough to fill the processor, never long.

    `longest`: tokens of the longest sequence; half of it is left for what is generated.
    """
    affordable = int(seconds * prefill_rate) if prefill_rate is not None else 128
    return max(1, min(512, max(16, affordable), longest // 2))


def _create_counter(resolved: ResolvedConfig) -> _Counter | None:
    """None where the layers are not known one by one."""
    plugin, options = create_class(resolved.model_family)
    family = cast(type[ModelFamily], plugin)
    if not family.capabilities.quantization or resolved.device_type != "cpu":
        return None
    return _Counter(resolved, family(options))


def _threads(explanation: Explanation) -> str:
    key = "executor.threads"
    count = next((value.value for value in explanation.values if value.key == key), None)
    if count is None:
        return "the executor's choice"
    return f"{count} ({_asked_by(explanation, key)})"


def _asked_by(explanation: Explanation, key: str) -> str:
    """Why the value is what it is, where a rule chose it, and else the key with the place that gives it."""
    reason = next((decision.reason for decision in explanation.decisions if decision.key == key), None)
    origin = next((value.origin for value in explanation.values if value.key == key), None)
    return reason or (key if origin is None else f"{key} ({origin})")


class _Counter:
    """Counts one model under several ways of holding its weights."""

    def __init__(self, resolved: ResolvedConfig, family: ModelFamily):
        self._resolved = resolved
        self._infos = _tensor_infos(resolved)
        model = resolved.model
        self.plan = plan_layers(
            family, model.hf_config, kv_dtype=resolved.cache.dtype, max_model_len=model.max_model_len
        )

    def current(self, context: int) -> Traffic:
        """The model as configured."""
        method: QuantizationMethod | None = None
        if self._resolved.quantization is not None:
            plugin, options = create_class(self._resolved.quantization)
            method = cast(type[QuantizationMethod], plugin)(options, self._resolved.quantization_need())
        return self._traffic(method, context)

    def alternatives(self, environment: Environment, context: int) -> Iterator[Alternative]:
        """Installed methods that could serve here with their default options, and read less for holding less."""
        need = self._resolved.quantization_need()
        chosen = self._resolved.quantization
        for installed in _installed_methods():
            if chosen is not None and chosen.name == installed.name:
                continue
            try:
                options = installed.plugin.Options()
                if not reasons_against(installed.plugin, need, options, environment):
                    method = installed.plugin(options, need)
                    served = self.plan.ask(method).layers.values()
                    if served and all(support.reads_once for support in served):
                        yield Alternative(installed.name, self._traffic(method, context))
            # A method that cannot be asked is none to advise; `dovetail plugins doctor` reports what is broken.
            except (DovetailError, ValueError, TypeError):
                continue

    def _traffic(self, method: QuantizationMethod | None, context: int) -> Traffic:
        resolved = self._resolved
        plain = DTYPE_BYTES[resolved.model.dtype]
        held = bytes_held(self.plan, method, plain, self._infos)
        return traffic_of(self.plan, held, resolved.cache.block_size, context)


@dataclass(frozen=True)
class _Installed:
    name: str
    plugin: type[QuantizationMethod]


def _installed_methods() -> Iterator[_Installed]:
    for point in sorted(entry_points(group=_METHODS), key=lambda point: point.name):
        try:
            plugin = point.load()
        except Exception:  # whatever a broken plugin raises; `dovetail plugins doctor` reports it
            continue
        if isinstance(plugin, type) and issubclass(plugin, QuantizationMethod):
            yield _Installed(point.name, plugin)


def _tensor_infos(resolved: ResolvedConfig) -> list[TensorInfo]:
    plugin, options = create_class(resolved.weight_format)
    reader = cast(type[WeightFormat], plugin)(options).open(resolved.model.files)
    try:
        return list(reader.infos())
    finally:
        reader.close()
