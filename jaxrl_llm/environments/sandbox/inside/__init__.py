"""The programs of the sandbox's own processes: a supervisor outside of it, and what it starts within.

They need the standard library alone, of which they import little, because each module takes a moment of every start.
Their code is sent to them, as that of a package `inside`: it must not load the library.
"""
