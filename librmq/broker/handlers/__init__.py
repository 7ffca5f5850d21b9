"""Handlers: what a broker does for each kind of request, and the parts that it does it with."""
