"""Histories of tests and of processes: events in columns, the rules that find anomalies, and what a test reads."""
