"""What waits: timers, relays, half messages and their checks."""
