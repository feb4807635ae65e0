"""Worker processes that several DataLoaders share.

pool.py       the processes: a template and its forks, one for each worker id
template.py   the template, and the datasets that it shares with its forks
place.py      one process, as all loaders see it
seats.py      what takes the place of a supervisor for one loader: a seat on each process
"""
