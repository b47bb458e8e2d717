"""An engine in another process gets new weights as one in this process does."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail import AsyncLLMEngine
from dovetail.contracts.errors import ModelError, RequestError
from dovetail.contracts.outputs import RequestOutput
from dovetail.contracts.regions import WEIGHTS
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.weight_transport import WeightsReport, WeightUpdateConflict
from dovetail.engine.remote.client import RemoteEngine
from dovetail.engine.remote.engine_process import EngineProcess
from dovetail.engine.remote.messages import WeightChange
from tests.engine.remote.conftest import until_idle

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def reversed_model(story_model: Path, tmp_path: Path) -> Path:
    """As `story_model`, and what that finds most likely this finds least likely."""
    shutil.copytree(story_model, tmp_path / "reversed")
    weights = load_file(story_model / "model.safetensors")
    weights["model.norm.weight"] = -weights["model.norm.weight"]
    save_file(weights, tmp_path / "reversed" / "model.safetensors", {"format": "pt"})
    return tmp_path / "reversed"


async def last(engine: RemoteEngine | AsyncLLMEngine) -> RequestOutput:
    found: RequestOutput = [output async for output in await engine.submit("Once upon a time", GREEDY)][-1]
    return found


async def update(engine: RemoteEngine | AsyncLLMEngine, checkpoint: Path) -> WeightsReport:
    await engine.init_weight_transfer_engine()
    await engine.start_weight_update()
    await engine.update_weights({"path": str(checkpoint)})
    return await engine.finish_weight_update()


def test_all_clients_have_the_weights_that_one_brings(
    engine_process: EngineProcess, local_engine: AsyncLLMEngine, story_model: Path, reversed_model: Path
) -> None:
    async def main() -> None:
        async with (
            await RemoteEngine.connect(engine_process.address, 60) as one,
            await RemoteEngine.connect(engine_process.address, 60) as other,
        ):
            before = await last(other)
            report = await update(one, reversed_model)
            assert report.version > before.weight_version
            assert await other.weights() == report == await one.weights()
            after = await last(other)
            assert (after.weight_version, after.weight_checksum) == (report.version, report.checksum)
            assert (await update(local_engine, reversed_model)).checksum == report.checksum
            expected = (await last(local_engine)).outputs[0].token_ids
            assert after.outputs[0].token_ids == expected != before.outputs[0].token_ids
            for engine in (one, local_engine):
                await update(engine, story_model)
            assert (await last(other)).outputs[0].token_ids == before.outputs[0].token_ids
            await until_idle(one)

    asyncio.run(main())


def test_errors_are_those_of_the_engine(engine_process: EngineProcess, reversed_model: Path) -> None:
    async def main() -> None:
        async with await RemoteEngine.connect(engine_process.address, 60) as engine:
            before = await engine.weights()
            await engine.init_weight_transfer_engine()
            with pytest.raises(WeightUpdateConflict, match="no update is under way"):
                await engine.finish_weight_update()
            with pytest.raises(WeightUpdateConflict, match="versions never go back"):
                await engine.start_weight_update(weight_version=before.version)
            with pytest.raises(RequestError, match="is_checkpoint_format"):
                await engine.start_weight_update(is_checkpoint_format=False)
            assert await engine.start_weight_update(partial=True) == before.version + 1
            with pytest.raises(RequestError, match="disk, ipc or collective, not by in_process"):
                await engine.update_weights({"weights": {"model.norm.weight": torch.zeros(64)}})
            with pytest.raises(RequestError, match="there is no drafter 'heads'"):
                await engine.update_weights({"path": str(reversed_model)}, drafter="heads")
            await engine.update_weights({"path": str(reversed_model)})
            await engine.abort_weight_update()
            await engine.start_weight_update()
            with pytest.raises(ModelError, match="no file or directory"):
                await engine.update_weights({"path": str(reversed_model / "nothing")})
            assert await engine.weights() == before

    asyncio.run(main())


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_change_is_repeated_once_whoever_asks_and_however_deep_the_engine_sleeps(
    level: int, with_remote: Callable[[Callable[[RemoteEngine], Awaitable[Any]]], Any], story_model: Path
) -> None:
    async def main(engine: RemoteEngine) -> None:
        async def repeated(change: WeightChange) -> WeightsReport:
            if level:
                await engine.sleep(level)
            one, other = await asyncio.gather(*(engine.repeat_weight_change(change) for _ in range(2)))
            assert one == other == await engine.weights()
            assert WEIGHTS not in [region.name for region in await engine.regions() if region.level]
            if await engine.is_sleeping():
                await engine.wake_up()
            return one

        version = (await engine.weights()).version + 10
        read = WeightChange(report=WeightsReport(version=version, checksum=""), reads_checkpoint=True)
        assert await repeated(read) == read.report
        assert engine.weight_changes == [read]
        own = await update(engine, story_model)
        assert [change.report for change in engine.weight_changes] == [own]
        again = WeightsReport(version=own.version + 1, checksum=own.checksum)
        assert await repeated(WeightChange(report=again, buckets=engine.weight_changes[0].buckets)) == again

    with_remote(main)


def test_a_client_does_not_end_what_another_has_begun(engine_process: EngineProcess, story_model: Path) -> None:
    async def main() -> None:
        async with await RemoteEngine.connect(engine_process.address, 60) as other:
            async with await RemoteEngine.connect(engine_process.address, 60) as engine:
                await engine.init_weight_transfer_engine()
                version = await engine.start_weight_update()
                change = WeightChange(report=WeightsReport(version=version, checksum=""), reads_checkpoint=True)
                with pytest.raises(WeightUpdateConflict, match="another client updates the weights"):
                    await other.repeat_weight_change(change)
                await engine.update_weights({"path": str(story_model)})
                assert await engine.finish_weight_update() == await other.repeat_weight_change(change)
                last = await engine.start_weight_update()
            change = WeightChange(report=WeightsReport(version=last, checksum=""), reads_checkpoint=True)
            while (await other.weights()).version < last:  # the engine may not have noticed yet that the client left
                with suppress(WeightUpdateConflict):
                    await other.repeat_weight_change(change)

    asyncio.run(main())
