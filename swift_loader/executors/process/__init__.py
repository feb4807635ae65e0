"""Builds batches in worker processes.

executor.py ──calls───► supervisor.py      one thread: starts the template and the workers, learns how they ended
│ ▲                   │ template.py, launch.py, event_loop.py
│ └──events── inbox.py ◄── supervisor's events
│                ▲
└──tasks──► worker.py ◄──messages── worker process
"""
