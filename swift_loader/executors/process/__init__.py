"""Builds batches in worker processes.

supervisor.py      one thread starts the template and the workers, and learns how they ended; the executor orders that
│ ▲                  │ event_loop_thread.py, templates.py, workers.py, launch.py
│ └──events── inbox.py ◄── supervisor's events
│                ▲
└──tasks──► ../handle.py ◄──messages── worker process

The handles on processes: template.py, and ../handle.py with memory (memory.py) and leases (lease.py) of its slots.
What comes from a worker: inbox.py waits for it, reader.py reads it, dataset_check.py compares the datasets.
What a person reads: explain.py, with deaths.py for exits, and diagnostics.py for stderr and stacks.
How processes start: templates.py chooses between launch.py for interpreters, roots.py and root.py for the process whose
forks are templates, and trainer_fork.py for forks of the trainer. How they end: event_loop_thread.py. What users fork:
forks.py.
"""
