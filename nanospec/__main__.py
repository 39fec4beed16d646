"""`python -m nanospec` is the command `nanospec`."""

from .apps.cli.process import command

if __name__ == "__main__":
    command()
