"""Examines a dataset: `swift-loader doctor package.module:make_dataset`, or `diagnose(Settings(...))`.

examination   starts a process that runs the dataset, and once more without each sample that kills it
child         what runs in that process: builds the dataset, measures its samples and fills in a `Diagnosis`
samples       what samples are like and what they draw; contents   what the dataset holds
stacks        which line is running; diagnosis   the result, and its text
"""

from swift_loader.doctor.diagnosis import Diagnosis, Finding, Settings, Severity
from swift_loader.doctor.examination import diagnose

__all__ = ["Diagnosis", "Finding", "Settings", "Severity", "diagnose"]
