"""What guesses, one method a file: `base.py` is the interface, `methods.py` makes what is asked for."""
