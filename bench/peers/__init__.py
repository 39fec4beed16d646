"""What others take for the same work: `gpu.py` on a GPU, in one process; the rest on a CPU, each system in a
process of its own environment (`make peers`), which `bench/cpu.py` starts and `worker.py` is.

An adapter is one small file that imports, when it starts, nothing but what it measures:

    PACKAGES                    whose versions are noted
    GUESSES                     what `start` may find in work["guess"]: None (no guesses), how many tokens, or
                                more; the fastest is chosen where there are several
    LARGEST_BATCH               most prompts it takes at once
    environment(python, cores)  variables that its process needs before it starts
    start(work)                 loads the model; gives generate(prompts, case), whose answers are token ids
    notes()                     optional: what else to record
"""
