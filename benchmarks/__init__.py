"""Measurements of librmq beside other libraries and beside the limits of the machine; each module is a command."""
