"""Builds batches in worker processes.

executor.py ──calls───► supervisor.py      one thread: starts the template and the workers, learns how they ended
│ ▲                   │ event_loop_thread.py, event_loop.py, templates.py, workers.py, launch.py
│ └──events── inbox.py ◄── supervisor's events
│                ▲
└──tasks──► ../handle.py ◄──messages── worker process

The handles on processes: template.py, and ../handle.py with memory (memory.py) and leases (lease.py) of its slots.
What comes from a worker: inbox.py waits for it, reader.py reads it, and dataset_check.py compares the datasets.
What a person reads: explain.py, with deaths.py for exits, and diagnostics.py for stderr and stacks.
How processes start and end: launch.py for interpreters, roots.py, root.py and blank_template.py for the process whose
forks are templates, trainer_fork.py for forks of the trainer, forks.py for forks of the user's, and termination.py.
"""
