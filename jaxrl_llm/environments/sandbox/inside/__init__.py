"""The programs of the sandbox's own processes: a supervisor outside of it, and what it starts within.

They need the standard library alone, of which they import little, because each module takes a moment of every start.
The package is imported as `inside`, from its folder: it must not load the library.
"""
