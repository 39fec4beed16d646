"""Sampling parameters beyond those of `SamplingParams`, one a file: `base.py` says how.

`rows.py` applies them to the steps of the rows that ask.
"""
