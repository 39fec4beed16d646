"""Families of models, one file each: how to read its `config.json`, and how its checkpoints name and store
weights. `base.py` is the interface. A file in this folder is found without being named elsewhere."""
