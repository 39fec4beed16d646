"""What a run looked like, step by step: kept only by an engine started with `trace=True`.

    drafts.py     what was guessed, rejected guesses too, kept on the device by row
    reasons.py    why so many guesses were verified: a policy that watches another one
    recorder.py   the extension: a record for each step of each request
    trace.py      all of it as plain data, and as a page to look at
    page/         that page: HTML, CSS and JavaScript, of which one file is made

Steps and graphs know nothing of this; of the policy only what it weighed is read.
"""
