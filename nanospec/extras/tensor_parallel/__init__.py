"""Tensor parallelism: one model on several devices, with one process (rank) for each.

`launch.py` starts the ranks, `job.py` ends all of them when one fails, `worker.py` has every rank take the
same steps and drafts, `shard.py` divides the weights, `group.py` connects the ranks. Rank 0 is the leader, to
which the engine speaks; the others follow.
"""
