"""Traces of requests, step by step, kept by an engine with `trace=True`.

recorder.py   the extension: a record for each step of each request, rejected drafts included
trace.py      the records as plain data and as an HTML page
page/         that page: HTML, CSS and JavaScript, joined into one file
"""
