"""The values of a report: one pass over the messages of each store, the findings, and a comparison."""
