"""A report: the sums of one pass over the messages of each store, findings, a comparison, and its page."""
