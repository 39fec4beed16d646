"""A deterministic simulation of the engine, in the manner of FoundationDB's.

    scenario.py    what happens: an engine's settings, requests with their times, faults; drawn from a seed
    model.py       a model whose scores depend on every token of a text, as they lie in the KV cache
    oracle.py      what each request must give, token by token, without any engine
    driver.py      runs a scenario, with what must hold after every step (`invariants.py`)
    faults.py      calls that fail
    watch.py       what must hold from one step to the next
    baton.py       threads that take turns as a seed has it
    shrink.py      makes a failing scenario smaller
    limit.py       how long one may take
    served.py      the same requests by HTTP
    command.py     its command line

`python -m campaigns.simulate --seeds 1000` runs them (`make simulate`). Nothing depends on the clock, on the
order of threads or on a random number that is not the seed's, so that a seed that fails fails again.
"""
