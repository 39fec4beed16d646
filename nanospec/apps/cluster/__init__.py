"""Many engines, by Ray: on this machine, or on the cluster that RAY_ADDRESS names.

`batch.py` answers a file of requests with several engines, `serve.py` answers OpenAI's requests over HTTP.
A replica is a whole engine in a process of its own and does not know the others. Needs the extra [ray].
"""
