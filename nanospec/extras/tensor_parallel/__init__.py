"""Tensor parallelism: one model on several devices, with one process (rank) per device.

`launch.py` starts the ranks, `job.py` stops all of them when one fails, `worker.py` makes every rank run the
same steps with the same drafts, `shard.py` splits the weights, and `group.py` connects the ranks. Rank 0 is
the leader: it runs the engine and sends commands to the other ranks, the followers.
"""
