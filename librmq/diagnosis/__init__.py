"""Findings about stores and brokers, and the report."""
