"""Open, verify, recover and salvage a store."""
