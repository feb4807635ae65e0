"""Builds batches in worker processes.

executor.py ──calls───► supervisor.py      one thread: starts the template and the workers, learns how they ended
│ ▲                   │ event_loop_thread.py, event_loop.py, templates.py, workers.py, launch.py
│ └──events── inbox.py ◄── supervisor's events
│                ▲
└──tasks──► ../handle.py ◄──messages── worker process

The handles on processes: template.py and worker.py, with child.py below both, and ../handle.py with memory (memory.py)
and leases (lease.py) of its slots.
What comes from a worker: inbox.py waits for it, reader.py reads it, dataset_check.py compares the datasets, and
resume.py keeps where each dataset continues.
What a person reads: explain.py, with deaths.py for exits, and diagnostics.py for stderr and stacks.
How processes start: template_starts.py chooses between launch.py for interpreters, roots.py, root.py and
blank_template.py for the process whose forks are templates, and trainer_fork.py for forks of the trainer, which
fork_need.py finds to be needed. How they end: termination.py. What the user forks: forks.py.
"""
