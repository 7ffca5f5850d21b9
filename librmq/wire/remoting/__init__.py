"""The 4.x protocol: frames over TCP, as classic clients, ``mqadmin`` and the dashboard speak it."""
