"""Tensor parallelism: one model on several devices, one process each.

`launch.py` starts the processes, `meeting.py` has them find each other, `team.py` looks after them;
`ranks.py` is the worker of each, which has the host's five messages reach all, and `guesses.py` what only the
leader's host can guess; `shard.py` says whose which part of the weights is; `group.py` is what ranks
exchange.
"""
