"""Several engines, run with Ray on this machine or on the cluster at RAY_ADDRESS.

`batch.py` runs a file of requests on several engines, `serve.py` is an OpenAI-compatible server. A replica is
an independent engine in its own process. Needs the extra [ray].
"""
