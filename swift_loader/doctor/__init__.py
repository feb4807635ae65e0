"""Examines a dataset: `swift-loader doctor package.module:make_dataset`, or `examination.diagnose(Settings(...))`.

    examination ──► isolated ──► a process (probes): runs the dataset, reports facts
         │                              │
         ▼                              ▼
    Diagnosis ◄── rules (pure) ◄──── Evidence

Probes measure and judge nothing; rules judge and touch nothing. Nothing is imported here: rules are pure, and the
loader's workers import a probe.
"""
