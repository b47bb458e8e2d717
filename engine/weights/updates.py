"""Weight updates in vLLM's four phases, over all workers of an engine: either every rank gets the new weights, or the
old ones stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.errors import ModelError, RequestError
from dovetail.contracts.regions import WEIGHTS, drafter_region
from dovetail.contracts.weight_transport import WeightsReport, WeightUpdateConflict
from dovetail.engine.exclusive_use import ExclusiveUse, exclusive
from dovetail.engine.kv.hashing import PagesIdentity
from dovetail.engine.weights.held import HeldWeights
from dovetail.engine.workers import Workers


class WeightUpdates:
    """The updates of one engine.

    Buckets are kept by the workers, and written by `finish_weight_update` once all ranks found them right. What fails
    before leaves the old weights, and ends the update: `start_weight_update` begins another.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        use: ExclusiveUse,
        held: HeldWeights,
        workers: Workers,
        reason_against: Callable[[], str | None],
        free: Callable[[], None],
    ):
        """`reason_against`: why weights cannot change now, as the end of a sentence; None: they can. `free`: waits for
        steps in flight, and takes the KV blocks of requests that a pause holds."""
        self.use = use
        self._config = config
        self._held = held
        self._workers = workers
        self._reason_against = reason_against
        self._free = free
        self._is_connected = False
        self._version: int | None = None
        """Of the update under way; None: there is none."""
        self._is_partial = False
        self._updated: set[str] = set()
        """Regions of which buckets came."""

    @property
    def pages(self) -> PagesIdentity:
        """What KV pages that are computed with the weights follow from."""
        return self._held.pages

    @property
    def report(self) -> WeightsReport:
        """The weights that the engine has. From any thread."""
        return self._held.report

    @property
    def is_under_way(self) -> bool:
        """Whether `start_weight_update` was called, and neither `finish_weight_update` nor `abort_weight_update`."""
        return self._version is not None

    @exclusive
    def note_read_as(self, version: int) -> None:
        """The checkpoint, which was read again, has this version in other engines. Raises `WeightUpdateConflict` for
        one that is not higher than the present one."""
        self._check_higher(version)
        self._held.replaced((), WeightsReport(version=version, checksum=""))

    @exclusive
    def init_weight_transfer_engine(self, init_info: Mapping[str, Any] | None = None) -> None:
        """Connects the config's `weight_transport`; once for any number of updates, and again for another trainer.
        `init_info`: what the transport takes. Raises `WeightUpdateConflict` during an update, `RequestError` or
        `ModelError` as the transport does."""
        if self._config.weight_transport is None:
            raise RequestError(
                "this engine takes no weights: set weight_transport to the name of one that is installed, such as"
                " in_process or disk"
            )
        self._check_none_under_way()
        self._is_connected = False
        self._workers.call("connect_weights", _mapping(init_info or {}, "init_info"))
        self._is_connected = True

    @exclusive
    def start_weight_update(
        self, is_checkpoint_format: bool = True, *, weight_version: int | None = None, partial: bool = False
    ) -> int:
        """Begins an update and returns its version.

        Args:
            is_checkpoint_format: tensors are named and shaped as in the checkpoint; nothing else is served.
            weight_version: that of the new weights, higher than the present one; None: one more than that.
            partial: some weights may be left out, and keep their values. Otherwise every target of the update (the
                model, a drafter) must get all of its weights.

        Raises:
            WeightUpdateConflict: before `init_weight_transfer_engine`, during another update, while requests are
                unfinished that no pause holds, or the engine sleeps; for a version that is not higher; for a partial
                update of invalid weights.
        """
        if is_checkpoint_format is not True:
            raise RequestError("is_checkpoint_format=False: kernels' own layouts are not taken; send the checkpoint's")
        if not self._is_connected:
            raise WeightUpdateConflict("no transport is connected: call init_weight_transfer_engine first")
        self._check_none_under_way()
        version = self._next_version(weight_version)
        if partial:
            self._held.check_valid()
        self._check_idle()
        self._workers.call("start_weights", bool(partial))
        self._version, self._is_partial, self._updated = version, bool(partial), set()
        return version

    @exclusive
    def update_weights(self, update_info: Mapping[str, Any], *, drafter: str | None = None) -> None:
        """Receives one bucket. `update_info`: what the transport takes. `drafter`: the label of the drafter whose
        weights these are; None: the model's.

        Raises what the transport raises, and `ModelError` for a tensor that came before; the update is ended then, and
        the old weights serve on.
        """
        self._check_started("update_weights")
        info = _mapping(update_info, "update_info")
        if drafter is not None:
            self._check_drafter(drafter)
        region = WEIGHTS if drafter is None else drafter_region(drafter)
        with self._ended_by_errors():
            self._check_idle()
            self._held.check_awake(region)
            self._workers.call("receive_weights", info, drafter or "")
        self._updated.add(region)

    @exclusive
    def finish_weight_update(self) -> WeightsReport:
        """Checks what came on all ranks, and then writes it. Requests that a pause holds keep their tokens, and are
        computed again with the new weights.

        Raises `ModelError` with names and shapes where tensors are missing, unknown or of another shape: the update is
        ended, and the old weights serve on. Where an error comes while weights are written, they are invalid: requests
        are refused until all weights were updated, or read again from the checkpoint.
        """
        version = self._check_started("finish_weight_update")
        with self._ended_by_errors():
            if not self._updated:
                raise ModelError("the update has no bucket: call update_weights before finish_weight_update")
            self._check_idle()
            self._check_higher(version)  # wake_up may have read another checkpoint since the start
            if self._is_partial:
                self._held.check_valid()  # the engine may have slept since the start
            for region in self._updated:
                self._held.check_awake(region)
            checksum = self._prepare()
            self._free()
        self._version = None
        try:
            self._workers.call("commit_weights")
        except BaseException as error:
            self._held.invalidate(
                self._updated, f"an update failed while it wrote them ({type(error).__name__}: {error})"
            )
            raise
        self._held.replaced(self._updated, WeightsReport(version=version, checksum=checksum))
        return self._held.report

    @exclusive
    def abort_weight_update(self) -> None:
        """Ends an update that is under way, if there is one; the old weights serve on."""
        self._version = None
        if self._is_connected:
            self._workers.call("abort_weights")

    def _prepare(self) -> str:
        before = self._held.report.checksum if self._is_partial else ""
        checksums = self._workers.call("prepare_weights", before)
        if len(set(checksums)) > 1:
            raise ModelError(
                f"the ranks received other tensors than each other ({', '.join(checksums)}): send them again"
            )
        return str(checksums[0])

    def _next_version(self, given: int | None) -> int:
        present = self._held.report.version
        if given is None:
            return present + 1
        if type(given) is not int:
            raise RequestError(f"weight_version {given!r} must be an integer, or None for the next one")
        self._check_higher(given)
        return given

    def _check_higher(self, version: int) -> None:
        present = self._held.report.version
        if version <= present:
            raise WeightUpdateConflict(
                f"weight_version {version} is not higher than {present}, which the engine has: versions never go back,"
                " so that no KV of other weights is taken for theirs"
            )

    def _check_started(self, phase: str) -> int:
        if self._version is None:
            raise WeightUpdateConflict(f"{phase}: no update is under way: call start_weight_update first")
        return self._version

    def _check_none_under_way(self) -> None:
        if self._version is not None:
            raise WeightUpdateConflict("an update is under way: call finish_weight_update or abort_weight_update first")

    def _check_idle(self) -> None:
        if reason := self._reason_against():
            raise WeightUpdateConflict(f"the weights cannot be updated {reason}")

    def _check_drafter(self, drafter: str) -> None:
        known = self._config.speculation.drafters if self._config.speculation is not None else {}
        if drafter not in known:
            raise RequestError(
                f"there is no drafter {drafter!r}: the config has {', '.join(known) or 'none (speculative.drafters)'}"
            )

    def _ended_by_errors(self) -> _EndedByErrors:
        return _EndedByErrors(self.abort_weight_update, lambda: self._held.is_valid)


class _EndedByErrors:
    """Ends the update where its block raises."""

    def __init__(self, abort: Callable[[], None], is_valid: Callable[[], bool]):
        self._abort = abort
        self._is_valid = is_valid

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            return
        try:
            self._abort()
        except Exception as other:  # a worker that died: what happened first is what is raised
            error.add_note(f"ending the update failed too: {other}")
        else:
            left = "the weights are the old ones" if self._is_valid() else "some weights are invalid, as before"
            error.add_note(f"The update was ended; {left}.")


def _mapping(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} must be a mapping, got {type(value).__name__}")
    return dict(value)
