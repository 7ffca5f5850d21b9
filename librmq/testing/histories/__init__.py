"""Histories of tests and of processes: events in rows, the rules that find anomalies, and what a test reads."""
