"""Messages that wait: timers, relays, half messages and their checks."""
