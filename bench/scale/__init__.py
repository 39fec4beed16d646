"""A fleet of replicas on paper.

What requests ask (`workload.py`), what steps cost (`costs.py`), how many drafts are verified (`guessing.py`),
one replica (`replica.py`), who gets which request (`routing.py`), all of them over time (`fleet.py`). The
questions that `docs/scaling.md` answers: those that need no time are in `paper.py`, the others in
`questions.py`, for which `runs.py` runs fleets.
"""
