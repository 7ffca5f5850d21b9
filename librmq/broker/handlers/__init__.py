"""Handlers of a broker's requests, and what they share; `in_flight` has the received messages for the wire."""
