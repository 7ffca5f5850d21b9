"""Benchmarks of librmq against other libraries and the limits of the machine; each module is a command."""
