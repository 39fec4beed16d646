"""Models: `folders` finds one by its name, `weights` loads it, given its family in `families/` and the format
of its checkpoint in `formats/`, and `decoder` or `cpu` runs it.
"""
