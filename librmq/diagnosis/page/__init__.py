"""The page of a report: one HTML file that loads nothing from elsewhere, with plots and without scripts.

Every string from a store is escaped. Needs the extra ``report``.
"""
