"""Deterministic simulation testing of the engine, as in FoundationDB.

    scenario.py    engine settings, requests with arrival times, and faults, generated from a seed
    model.py       a model whose logits depend on every token in the KV cache
    oracle.py      computes the expected output of each request, token by token, without an engine
    driver.py      runs a scenario and compares it with the oracle
    invariants.py  checks of the engine's state after every step
    watch.py       checks across steps: progress, order of admission, drafts
    faults.py      injects failures into calls
    baton.py       deterministic scheduling of threads
    shrink.py      reduces a failing scenario
    limit.py       a time limit
    served.py      the same requests over HTTP
    command.py     the command line

`python -m campaigns.simulate --seeds 1000` runs it (`make simulate`). A run depends only on its
seed, not on the clock or on thread scheduling, so failures are reproducible.
"""
