"""What a run looked like, step by step: kept only by an engine started with `trace=True`.

recorder.py   the extension: a record for each step of each request, rejected drafts included
trace.py      all of it as plain data, and as a page to look at
page/         that page: HTML, CSS and JavaScript, joined into one file
"""
