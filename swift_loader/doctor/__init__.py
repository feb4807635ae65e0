"""Examines a dataset: `swift-loader doctor package.module:make_dataset`, or `diagnose(Settings(...))`.

examination   what to examine, and the result and its text; the command, which starts a process that runs the dataset
child         what that process does, part by part; it fills in a `Diagnosis`
samples       fetches samples: which lines take their time, and whether they can be repeated; what the dataset holds
"""

from swift_loader.doctor.examination import Diagnosis, Finding, Settings, Severity, diagnose

__all__ = ["Diagnosis", "Finding", "Settings", "Severity", "diagnose"]
