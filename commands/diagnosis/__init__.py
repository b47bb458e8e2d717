"""Examines plugins: what their metadata, their sources and their classes get wrong, each with what to do."""

from __future__ import annotations

from dovetail.commands.diagnosis.examination import Diagnosis, diagnose, reference_entry
from dovetail.commands.diagnosis.finding import CODES, Code, Finding, Severity

__all__ = ["CODES", "Code", "Diagnosis", "Finding", "Severity", "diagnose", "reference_entry"]
