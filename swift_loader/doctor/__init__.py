"""Examines a dataset: `swift-loader doctor package.module:make_dataset`, or `diagnose(Settings(...))`.

    examination ──► isolated ──► a process (probes): runs the dataset, reports facts
         │                              │
         ▼                              ▼
    Diagnosis ◄── rules (pure) ◄──── Evidence

Probes measure and judge nothing; rules judge and touch nothing.
"""

from swift_loader.doctor.diagnosis import Diagnosis
from swift_loader.doctor.examination import diagnose
from swift_loader.doctor.findings import Finding, Severity
from swift_loader.doctor.settings import Settings

__all__ = ["Diagnosis", "Finding", "Settings", "Severity", "diagnose"]
