"""Tensor parallelism: one model on several devices, with one process (rank) per device. Rank 0 is the leader:
it runs the engine (`worker.py`), and starts the others, the followers (`launcher.py`)."""
