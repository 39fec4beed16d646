"""What `bench/serve.py` is made of: when requests are sent (`arrivals.py`), the process that sends them
(`client.py`) and reads what came back (`answers.py`), the servers (`servers.py`), whose turn it is
(`race.py`), and what is said of them (`figures.py`, `tables.py`)."""
