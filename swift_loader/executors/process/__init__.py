"""Worker processes that are forked from templates, or started afresh: on Linux.

fleet.py       what the executor uses: it lets the starter's thread start processes and learn how they ended
│ ▲              │ starter.py on loop_thread.py; roots.py, launch.py, trainer_fork.py
│ └──ended───────┘
└──tasks──► ../handle.py ◄──messages── worker process

The handle on any process: server.py. That on a worker, with memory and leases (memory.py) of its slots: ../handle.py.
What comes from a worker: the inbox in fleet.py waits for it, reader.py reads it and compares the datasets.
What a person reads: ../wording.py, with diagnostics.py for stderr and stacks.
How processes start: starter.py chooses between interpreters (launch.py), roots.py for the process whose
forks are templates, and trainer_fork.py for forks of the trainer. What users fork: forks.py.
"""
