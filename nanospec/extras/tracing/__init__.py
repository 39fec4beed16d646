"""What a run looked like, step by step: kept only by an engine started with `trace=True`.

    drafts.py     what was guessed, rejected guesses too, kept on the device by row
    recorder.py   the extension: a record for each step of each request
    trace.py      all of it as plain data, and as a page to look at
    page/         that page: HTML, CSS and JavaScript, of which one file is made

Steps, graphs and the policy know nothing of this.
"""
