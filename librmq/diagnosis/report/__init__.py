"""The page of a report: sections with words, plots and tables, as HTML that opens offline.

The page is complete in itself: plots are part of it, it has no script, and every text from a store is
escaped. Needs the extra ``report``.
"""

from librmq.diagnosis.report.page import Page, Section, Tile
from librmq.diagnosis.report.plots import bars, lines

__all__ = ["Page", "Section", "Tile", "bars", "lines"]
