"""Worker processes by means that every system has: macOS and Windows, too.

Each worker is a fresh interpreter with its own dataset. Frames are the same as those of `executors.process`, and what
reads them, too. Other means carry them: connections of `multiprocessing`, and shared memory with names. Nothing is
forked, no descriptor is sent, and each wait is `multiprocessing.connection.wait`.

fleet.py         starts the interpreters, and stops them; its inbox waits for them
│ ▲                │ interpreter.py: a process, its pipes, and a thread that waits for its end
│ └────────ended───┘
└──tasks──► handle ◄──messages── worker process (worker/portable.py)
"""
