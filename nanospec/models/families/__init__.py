"""Which models there are, one family a file: what its `config.json` means, and how its checkpoints name and
store the weights. `base.py` is the interface. A file that is put here is found; nothing else names it."""
