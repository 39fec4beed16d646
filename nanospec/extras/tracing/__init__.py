"""Traces of an engine with `trace=True`: every step of every request.

recorder.py   the extension that records each step of each request, including rejected drafts
trace.py      the records as plain data and as an HTML page
page/         the HTML, CSS and JavaScript of the page, which are joined into one file
"""
