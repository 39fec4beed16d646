"""An OpenAI-compatible server. `app.py` contains the routes.

A request passes the middleware in `gate.py`, is parsed and validated by `requests.py`, runs in the engine
thread of `loop.py`, and is answered by `answers.py`. Needs the extra [serve].
"""
