"""A loaded model with a KV cache: it runs steps, and may sleep."""

from __future__ import annotations

from functools import partial

from dovetail.contracts.errors import CapacityError, WorkerError
from dovetail.contracts.kv import KVLayout
from dovetail.contracts.logits import LogitsProcessor
from dovetail.worker.block_mover import BlockMover
from dovetail.worker.forward import ForwardPass, create_forward
from dovetail.worker.input_batch import InputBatch
from dovetail.worker.kv_storage import KVStorage
from dovetail.worker.loaded_model import LoadedModel
from dovetail.worker.machine.free_memory import give_back_free_memory
from dovetail.worker.model_runner import ModelRunner
from dovetail.worker.pooling.create import create_poolers
from dovetail.worker.pooling.pooling import PoolingRequests
from dovetail.worker.sampling.grammar_compiler import GrammarCompiler
from dovetail.worker.sleep import Sleeper


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

    def prepare_sleep(self, level: int) -> SleepingWorker:
        """Waits for the device. `SleepingWorker.give_memory_back` does the rest."""
        self.loaded.setup.device.synchronize()
        return SleepingWorker(self, level)


class SleepingWorker:
    """A worker that runs again after `wake_up`."""

    def __init__(self, running: RunningWorker, level: int):
        """`level`: as `Sleeper` has it."""
        self.running = running
        self._device = running.loaded.setup.device
        adapters = running.loaded.adapters
        slots = adapters.tensors if adapters is not None else []
        self._sleeper = Sleeper(running.loaded.model, [*running.storage.tensors, *slots], self._device, level)

    def give_memory_back(self) -> int:
        """Frees KV pages, weights and captured graphs; how many bytes."""
        if self.running.loaded.adapters is not None:
            self.running.loaded.adapters.forget_slots()  # the engine places them again
        self.running.forward.release()  # graphs hold memory of their own, and addresses that will not be right any more
        given_back = self._sleeper.sleep()
        give_back_free_memory()
        return given_back

    def wake_up(self, *, new_weights: bool) -> RunningWorker:
        """Takes memory again and fills it. Where something fails, it may be called again, but for a `WorkerError`.

        Args:
            new_weights: whether another checkpoint is taken than the one that was loaded.

        Raises:
            ModelError: where the weights are to be read again and cannot be, or are others and `new_weights` is False.
            WorkerError: where graphs could not be captured, for want of memory too: this process cannot be used any
                more.
        """
        if self._sleeper.reads_weights and not new_weights:
            self.running.loaded.check_checkpoint()
        # Handed over like steps: the calling thread may have another current stream than theirs.
        self._device.launch(partial(_fill, self._sleeper, self.running.loaded))
        self._device.synchronize()
        try:
            self.running.forward.prepare()
        except CapacityError as error:
            raise WorkerError(
                f"capturing graphs anew ran out of memory, and this process cannot be used any more: {error}"
            ) from error
        return self.running


def _fill(sleeper: Sleeper, loaded: LoadedModel) -> None:
    sleeper.wake_up()
    if sleeper.reads_weights:
        loaded.read_weights()
