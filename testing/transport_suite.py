"""Conformance suite of weight transports. A third party's test is a subclass that names what sends::

    from dovetail.testing import WeightSender, WeightTransportSuite

    class MySender(WeightSender):
        def __init__(self, folder): ...
        def connect(self, num_ranks): return {"address": self.address}
        def send(self, tensors): self.queue.put(tensors); return {}

    class TestMyTransport(WeightTransportSuite):
        plugin = MyTransport
        create_sender = MySender

Transport and sender are in one process; several ranks are threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from dovetail.contracts.errors import ModelError, RequestError
from dovetail.contracts.weight_transport import TransportSetup, WeightTransport
from dovetail.contracts.weights import WeightReader
from dovetail.nn.loading import are_equal
from dovetail.testing.suite import SUITES, PluginSuite


class WeightSender(ABC):
    """The other end of a transport, as a trainer has it."""

    @abstractmethod
    def connect(self, num_ranks: int) -> Mapping[str, Any]:
        """Gets ready for so many transports, and returns their `init_info`. Does not wait for them."""

    @abstractmethod
    def send(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        """Begins to send a bucket, and returns its `update_info`. Does not wait until it has arrived. The tensors stay
        as they are until the next call."""

    def close(self) -> None:
        """Gives back what the sender holds. Idempotent."""
        return None


CreateSender = Callable[[Path], WeightSender]
"""Makes a sender, which may write to an empty folder."""


def _refuse_checkpoint(path: Path) -> WeightReader:
    raise ModelError(f"{path} is no checkpoint")


class WeightTransportSuite(PluginSuite):
    """Tests of every weight transport."""

    kind: ClassVar[str] = "weight_transport"
    plugin: ClassVar[type[WeightTransport]]
    options: ClassVar[Mapping[str, Any]] = {}
    """Options of the transport in the config."""
    create_sender: ClassVar[CreateSender | None] = None
    """What sends: a class, or a function."""
    open_checkpoint: ClassVar[Callable[[Path], WeightReader]] = _refuse_checkpoint
    """For a transport that reads checkpoints, what opens those of the sender."""
    function_attributes: ClassVar[frozenset[str]] = frozenset({"create_sender", "open_checkpoint"})

    @classmethod
    def reason_incomplete(cls) -> str | None:
        """A transport needs a sender."""
        if reason := super().reason_incomplete():
            return reason
        return f"{cls.__name__} needs {SUITES[cls.kind].needs}" if cls.create_sender is None else None

    @pytest.fixture
    def sender(self, tmp_path: Path) -> Iterator[WeightSender]:
        """A new one; it is closed after the test."""
        create = type(self).create_sender
        assert create is not None
        sender = create(tmp_path)
        yield sender
        sender.close()

    @pytest.fixture
    def transport(self, sender: WeightSender) -> Iterator[WeightTransport]:
        """Of one rank, connected."""
        (transport,) = self._connected(sender, 1)
        yield transport
        transport.close()

    def test_brings_what_was_sent(self, transport: WeightTransport, sender: WeightSender) -> None:
        """Names, shapes, dtypes and bits, of tensors of any size."""
        tensors = bucket(0)
        reader = transport.receive(sender.send(tensors))
        infos = {info.name: info for info in reader.infos()}
        assert infos.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert infos[name].shape == tuple(tensor.shape), name
            assert infos[name].dtype == str(tensor.dtype).removeprefix("torch."), name
            assert infos[name].num_bytes == tensor.numel() * tensor.element_size(), name
        check_equal(reader, tensors)
        reader.close()

    def test_tensors_are_on_the_cpu(self, transport: WeightTransport, sender: WeightSender) -> None:
        """Where blocks cut out their shares."""
        reader = transport.receive(sender.send(bucket(0)))
        for info in reader.infos():
            assert reader.read(info.name).device.type == "cpu"
        reader.close()

    def test_buckets_follow_each_other(self, transport: WeightTransport, sender: WeightSender) -> None:
        """Each with its own tensors, each closed before the next."""
        for index in range(4):
            tensors = bucket(index)
            reader = transport.receive(sender.send(tensors))
            check_equal(reader, tensors)
            reader.close()
            reader.close()

    def test_keeps_what_it_says_it_keeps(self, transport: WeightTransport, sender: WeightSender) -> None:
        """With the capability `keeps_tensors`, buckets stay readable while others come."""
        self.require("keeps_tensors")
        first = transport.receive(sender.send(bucket(0)))
        second = transport.receive(sender.send(bucket(1)))
        check_equal(first, bucket(0))
        check_equal(second, bucket(1))
        first.close()
        second.close()

    def test_reaches_every_rank(self, sender: WeightSender) -> None:
        """Each gets the whole bucket."""
        self.require(tensor_parallel=2)
        transports = self._connected(sender, 2)
        for index in range(2):
            info = sender.send(bucket(index))
            with ThreadPoolExecutor(2) as ranks:
                for reader in ranks.map(lambda transport, info=info: transport.receive(info), transports):
                    check_equal(reader, bucket(index))
                    reader.close()
        for transport in transports:
            transport.close()

    def test_refuses_what_it_cannot_use(self, transport: WeightTransport, sender: WeightSender) -> None:
        """Keys that it does not know are refused by name or by what it takes, and the next bucket comes."""
        with pytest.raises((RequestError, ModelError)):
            transport.receive({"no_such_key": 1})
        tensors = bucket(3)
        reader = transport.receive(sender.send(tensors))
        check_equal(reader, tensors)
        reader.close()

    def test_refuses_odd_ways_to_connect(self) -> None:
        """What is no `init_info` of the transport."""
        transport = self._create(0, 1)
        with pytest.raises((RequestError, ModelError)):
            transport.connect({"no_such_key": 1})
        transport.close()

    def test_close_comes_any_number_of_times(self, transport: WeightTransport) -> None:
        """It gives back what there is."""
        transport.close()
        transport.close()

    def _create(self, rank: int, num_ranks: int) -> WeightTransport:
        setup = TransportSetup(
            device=torch.device("cpu"), rank=rank, num_ranks=num_ranks, open_checkpoint=type(self).open_checkpoint
        )
        return self.plugin(self.plugin.Options.model_validate(dict(self.options)), setup)

    def _connected(self, sender: WeightSender, num_ranks: int) -> list[WeightTransport]:
        info = sender.connect(num_ranks)
        transports = [self._create(rank, num_ranks) for rank in range(num_ranks)]
        with ThreadPoolExecutor(num_ranks) as ranks:
            list(ranks.map(lambda transport: transport.connect(info), transports))
        return transports


def bucket(index: int) -> dict[str, torch.Tensor]:
    """The tensors of one bucket: several dtypes and shapes, a large one and a scalar among them."""
    generator = torch.Generator().manual_seed(index)
    shapes = {"large": (300, 257), "row": (65,), "one": (1, 1), "scalar": ()}
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    return {
        f"bucket{index}.{name}.weight": torch.randn(shape, generator=generator).to(dtype)
        for (name, shape), dtype in zip(shapes.items(), dtypes, strict=True)
    }


def check_equal(reader: WeightReader, tensors: Mapping[str, torch.Tensor]) -> None:
    """What is read has the dtypes and bits of `tensors`."""
    found = dict(reader.tensors())
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        got = found[name]
        assert isinstance(got, torch.Tensor), f"{name} is packed"
        assert (got.dtype, tuple(got.shape)) == (tensor.dtype, tuple(tensor.shape)), name
        assert are_equal(got, tensor), f"{name} has other values than were sent"
