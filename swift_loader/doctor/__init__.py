"""Examines a dataset: `swift-loader doctor package.module:make_dataset`, or `diagnose(Settings(...))`.

examination   the command; starts a process that runs the dataset, and once more without each sample that kills it
child         what that process does, part by part; it fills in a `Diagnosis`
samples       fetches samples: what they are like, and what they draw from
contents      what the dataset holds
stacks        which line is running
diagnosis     the result, and its text
"""

from swift_loader.doctor.diagnosis import Diagnosis, Finding, Settings, Severity
from swift_loader.doctor.examination import diagnose

__all__ = ["Diagnosis", "Finding", "Settings", "Severity", "diagnose"]
