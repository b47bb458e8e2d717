"""The bundled backends pass the suite that third parties run."""

from dovetail.attention_backends.paged_cpu.backend import PagedCPUBackend
from dovetail.attention_backends.reference import ReferenceBackend
from dovetail.attention_backends.sdpa import SDPABackend
from dovetail.testing.attention_suite import AttentionBackendSuite


class TestReference(AttentionBackendSuite):
    plugin = ReferenceBackend
    num_cases = 3


class TestPagedCPU(AttentionBackendSuite):
    plugin = PagedCPUBackend


class TestSDPA(AttentionBackendSuite):
    plugin = SDPABackend
    num_cases = 4
