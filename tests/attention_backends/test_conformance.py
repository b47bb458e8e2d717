"""The bundled backends pass the suite that third parties run."""

from dovetail.attention_backends.paged_cpu.backend import PagedCPUBackend
from dovetail.attention_backends.reference import ReferenceBackend
from dovetail.attention_backends.sdpa import SDPABackend
from dovetail.testing.attention_suite import AttentionBackendSuite


class TestReference(AttentionBackendSuite):
    backend_class = ReferenceBackend
    num_cases = 3


class TestPagedCPU(AttentionBackendSuite):
    backend_class = PagedCPUBackend


class TestSDPA(AttentionBackendSuite):
    backend_class = SDPABackend
    num_cases = 4
