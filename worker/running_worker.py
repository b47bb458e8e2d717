"""A loaded model with a KV cache: it runs steps."""

from __future__ import annotations

from dovetail.contracts.kv import KVLayout
from dovetail.contracts.logits import LogitsProcessor
from dovetail.worker.block_mover import BlockMover
from dovetail.worker.forward import ForwardPass, create_forward
from dovetail.worker.input_batch import InputBatch
from dovetail.worker.kv_layout import of_stage
from dovetail.worker.kv_storage import KVStorage
from dovetail.worker.loaded_model import LoadedModel
from dovetail.worker.model_runner import ModelRunner
from dovetail.worker.pooling.create import create_poolers
from dovetail.worker.pooling.pooling import PoolingRequests
from dovetail.worker.sampling.grammar_compiler import GrammarCompiler


def initialize_cache(
    loaded: LoadedModel,
    layout: KVLayout,
    num_blocks: int,
    num_host_blocks: int,
    grammars: GrammarCompiler | None = None,
) -> RunningWorker:
    """Gives the model a KV cache of so many blocks on the device and on the host, and a runner. `grammars`: what
    compiles those of requests; None where there is no plugin for it."""
    setup, context = loaded.setup, loaded.context
    config, device, placement = setup.config, setup.device, setup.placement
    layout = of_stage(layout, placement.stage)
    storage = KVStorage(layout, num_blocks, num_host_blocks, setup.torch_device, has_extra=placement.answers)
    backends = loaded.bind(layout, storage)
    processors: dict[str, LogitsProcessor] = {
        name: setup.plugins.create(component, setup.logits) for name, component in config.logits_processors.items()
    }
    max_query_len = loaded.speculation.max_query_len
    batch = InputBatch(
        config.limits.max_num_seqs,
        config.model.max_model_len,
        layout.block_size,
        len(layout.groups),
        max_query_len - 1,
        loaded.adapters,
    )
    speculation = loaded.speculation.start(layout, storage, batch, backends)
    forward = create_forward(
        device,
        placement.runtime,
        loaded.forward,
        backends,
        config.limits,
        loaded.query_lens,
        loaded.link,
        loaded.speculation.hidden_layers,
        caches=[layer.cache for layer in context.attention_layers],
        enforce_eager=config.enforce_eager,
        obstacle=loaded.why_not_captured(backends),
        has_adapters=loaded.adapters is not None,
    )
    mover = BlockMover(device, storage)
    runner = ModelRunner(
        config,
        loaded.model,
        context,
        mover,
        forward,
        device,
        processors,
        grammars,
        speculation,
        batch,
        link=loaded.link,
        answers=placement.answers,
        pooling=PoolingRequests(create_poolers(loaded) if placement.answers else {}),
        adapters=loaded.adapters,
    )
    return RunningWorker(loaded, storage, forward, runner)


class RunningWorker:
    """Made by `initialize_cache`."""

    def __init__(self, loaded: LoadedModel, storage: KVStorage, forward: ForwardPass, runner: ModelRunner):
        self.loaded = loaded
        self.storage = storage
        self.forward = forward
        self.runner = runner
