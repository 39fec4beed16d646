"""Options that implement `device/extension.py` or wrap the worker."""
