"""An OpenAI-compatible server. `app.py` is its routes, `loop.py` the engine behind them.

A request passes `gate.py`, is read and checked by `requests.py`, runs in `loop.py`, and is answered by
`answers.py`. Needs the extra [serve]: starlette, uvicorn and prometheus-client.
"""
