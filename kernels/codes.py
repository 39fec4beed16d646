"""Numbers that host and device agree on. Needs nothing, so that what may be set can be checked without torch."""

MAX_DRAFTS = 63  # per request and step: with the last committed token, one bit each of an int64
MAX_TREE_WIDTH = 8  # continuations of a request in one step
MAX_STOP_IDS = 32  # per request, end-of-sequence tokens included

RUNNING, STOPPED, LENGTH, NAN = 0, 1, 2, 3  # Table.finished: how a request ended
EXACT, REJECTION, TYPICAL = 0, 1, 2  # Table.rule: which drafts are accepted, see `sampling/accept.py`
RULES = ("exact", "rejection", "typical")  # their names, by code
NOBODY = -1  # Proposal.drafter: no drafts
OWN, GUESSED = -1, -2  # Proposal.source in place of an index: the target's own token; a model's guess
NAN_TOKEN = -1  # in place of a token: there was nothing to draw from
