"""The bundled poolers under their suite."""

from __future__ import annotations

from dovetail.plugins.poolers.classify import ClassifyClsPooler, ClassifyPooler, TokenClassifyPooler
from dovetail.plugins.poolers.states import ClsPooler, LastPooler, MeanPooler, TokenPooler
from dovetail.testing.pooler_suite import PoolerSuite


class TestLast(PoolerSuite):
    plugin = LastPooler


class TestMean(PoolerSuite):
    plugin = MeanPooler


class TestCls(PoolerSuite):
    plugin = ClsPooler


class TestToken(PoolerSuite):
    plugin = TokenPooler


class TestClassify(PoolerSuite):
    plugin = ClassifyPooler


class TestTokenClassify(PoolerSuite):
    plugin = TokenClassifyPooler


class TestClassifyCls(PoolerSuite):
    plugin = ClassifyClsPooler
