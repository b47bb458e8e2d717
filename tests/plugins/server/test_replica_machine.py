"""Replicas share a machine: cores and GPUs of their own."""

from __future__ import annotations

import pytest

from dovetail.contracts.errors import ConfigError
from dovetail.plugins.server.replica_machine import replica_shares

CORES = [[0, 4], [1, 5], [2, 6], [3, 7]]
"""Four physical cores of two threads each."""


def test_physical_cores_are_shared_out_and_each_is_computed_on_by_one_thread() -> None:
    first, second = replica_shares(2, device="cpu", cores=CORES, environment={})
    assert (first.cores, second.cores) == ({0, 4, 1, 5}, {2, 6, 3, 7})
    assert first.environment == second.environment == {"OMP_NUM_THREADS": "2"}
    several = replica_shares(5, device="cpu", cores=CORES, environment={"OMP_NUM_THREADS": "3"})
    assert all(not share.cores and not share.environment for share in several)


@pytest.mark.parametrize(
    ("environment", "devices", "expected"),
    [
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, (), ["4,5", "6,7"]),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, ("0", "0"), ["0", "0"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, (), [None, None]),
    ],
)
def test_gpus_are_shared_out(environment: dict[str, str], devices: tuple[str, ...], expected: list[str]) -> None:
    shares = replica_shares(2, devices, cores=CORES, environment=environment)
    assert [share.environment.get("CUDA_VISIBLE_DEVICES") for share in shares] == expected


def test_a_gpu_that_replicas_would_share_without_being_told_is_refused() -> None:
    with pytest.raises(ConfigError, match="there are 1 GPUs: replicas would compute on the same"):
        replica_shares(2, cores=CORES, environment={"CUDA_VISIBLE_DEVICES": "3"})
    with pytest.raises(ConfigError, match="has 3 entries"):
        replica_shares(2, ("0", "1", "2"), cores=CORES, environment={})
