"""What guesses, one method a file; `base.py` is the interface, `loading.py` makes what is asked for."""
