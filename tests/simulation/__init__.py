"""The whole product under one seed: clients of all kinds, a broker, its disk and its failures, for days of moved time.

`world` runs it, `promises` judges it beside the checker of histories, `python -m tests.simulation` repeats a seed.
`shares` runs processes that share a store, and kills them.
"""
