"""The page of a report: one file of HTML that needs nothing from elsewhere, with plots and no script.

Every text from a store is escaped. Needs the extra ``report``.
"""
