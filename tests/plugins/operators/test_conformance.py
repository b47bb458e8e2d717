"""The bundled sets pass the suite that third parties run."""

from dovetail.nn.operators import TorchOperators
from dovetail.plugins.operators.native import NativeOperators
from dovetail.testing.operators_suite import OperatorsSuite


class TestTorch(OperatorsSuite):
    plugin = TorchOperators


class TestNative(OperatorsSuite):
    plugin = NativeOperators
