"""Worker processes that are forked from templates, or were templates: on Linux.

fleet.py       what the executor uses: it lets the starter's thread start processes and learn how they ended
│ ▲              │ starter.py on loop_thread.py; launch.py, root.py, trainer_fork.py
│ └──events── inbox.py
│                ▲
└──tasks──► ../handle.py ◄──messages── worker process

The handles on processes: template.py, and ../handle.py with memory (memory.py) and leases (lease.py) of its slots.
What comes from a worker: inbox.py waits for it, reader.py reads it and compares the datasets.
What a person reads: ../wording.py, with diagnostics.py for stderr and stacks.
How processes start: starter.py chooses between launch.py for interpreters, root.py for the process whose
forks are templates, and trainer_fork.py for forks of the trainer. What users fork: forks.py.
"""
