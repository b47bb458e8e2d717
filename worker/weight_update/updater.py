"""One worker's side of weight updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial as bound
from pathlib import Path
from typing import Any

from dovetail.contracts.errors import PluginError
from dovetail.contracts.weight_transport import TransportSetup, WeightTransport
from dovetail.contracts.weights import ModelFiles, WeightReader
from dovetail.worker.loaded_model import LoadedModel
from dovetail.worker.weight_update.staged import StagedWeights, checksum_of
from dovetail.worker.weight_update.targets import UpdateTarget

MODEL = ""
"""The name of the model itself among the targets; drafters have theirs."""


class WeightUpdater:
    """Receives the buckets of an update, and writes them once all ranks have found them right.

    Buckets are kept until `commit`, so until then the old weights serve. The engine calls, on every rank alike:
    `connect`, then for each update `start`, `receive` for each bucket, `prepare`, `commit`; or `abort`.
    """

    def __init__(self, loaded: LoadedModel):
        self._loaded = loaded
        self._transport: WeightTransport | None = None
        self._staged: dict[str, StagedWeights] = {}
        self._targets: dict[str, Sequence[UpdateTarget]] = {}
        self._is_partial = False

    def connect(self, init_info: Mapping[str, Any]) -> None:
        """Makes the transport, in place of an earlier one."""
        self.close()
        setup, component = self._loaded.setup, self._loaded.setup.config.weight_transport
        if component is None:
            raise PluginError("the engine connects a transport, and the config has no weight_transport")
        transport: WeightTransport = setup.plugins.create(
            component,
            TransportSetup(
                device=setup.torch_device,
                rank=setup.placement.rank,
                num_ranks=setup.placement.layout.num_ranks,
                open_checkpoint=self._open_checkpoint,
            ),
        )
        try:
            transport.connect(init_info)
        except BaseException:
            transport.close()
            raise
        self._transport = transport

    def start(self, partial: bool) -> None:
        """An update begins. `partial`: it may leave weights out, which stay."""
        self.abort()
        self._is_partial = partial

    def receive(self, update_info: Mapping[str, Any], target: str) -> None:
        """One bucket for `target`: `MODEL`, or a drafter's name. Raises `ModelError` or `RequestError`."""
        transport = self._transport
        if transport is None:
            raise PluginError("the engine asks for a bucket before the transport is connected")
        if target not in self._staged:
            self._targets[target] = found = self._find(target)
            formats = found[0].packed_formats if found else frozenset[str]()
            self._staged[target] = StagedWeights(formats, copies=not transport.capabilities.keeps_tensors)
        self._staged[target].add(transport.receive(update_info))

    def prepare(self, before: str) -> str:
        """Checks what came; returns the checksum of the new weights. `before`: as in `checksum_of`. Raises `ModelError`
        with names and shapes."""
        for name, staged in self._staged.items():
            for target in self._targets[name]:
                target.check(staged, partial=self._is_partial)
        return checksum_of(self._digests(), before)

    def commit(self) -> None:
        """Writes. An error leaves weights that are neither the old nor the new ones."""
        device = self._loaded.setup.device
        device.synchronize()
        try:
            # Handed over like steps: the calling thread may have another current stream than theirs.
            device.launch(bound(self._write))
            device.synchronize()
        finally:
            self.abort()

    def abort(self) -> None:
        """Forgets what came since `start`. Idempotent."""
        staged, self._staged, self._targets = self._staged, {}, {}
        for one in staged.values():
            one.close()

    def close(self) -> None:
        """Ends the transport too. Idempotent."""
        self.abort()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def _find(self, target: str) -> Sequence[UpdateTarget]:
        """Empty on ranks that have no part of it: only the one that drafts has drafters."""
        if target == MODEL:
            return self._loaded.update_targets()
        found = self._loaded.speculation.update_target(target)
        return () if found is None else (found,)

    def _digests(self) -> Iterator[tuple[str, str]]:
        for name, staged in self._staged.items():
            for tensor, line in staged.digests():
                yield f"{name} {tensor}", f"{name} {line}"

    def _write(self) -> None:
        for name, staged in self._staged.items():
            for target in self._targets[name]:
                target.load(staged.tensors(), partial=self._is_partial)
        if MODEL in self._staged:
            self._loaded.weights_replaced()

    def _open_checkpoint(self, path: Path) -> WeightReader:
        setup = self._loaded.setup
        reader: WeightReader = setup.plugins.create(setup.config.weight_format).open(ModelFiles(str(path), path))
        return reader
