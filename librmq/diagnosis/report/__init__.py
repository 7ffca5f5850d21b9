"""One page for people: sections of words, plots and tables, as HTML that opens offline.

Nothing on it comes from elsewhere: plots are drawn into the page, there is no script, and every text from a store is
escaped. Needs the extra ``report``.
"""

from librmq.diagnosis.report.page import Page, Section, Tile
from librmq.diagnosis.report.plots import bars, lines

__all__ = ["Page", "Section", "Tile", "bars", "lines"]
