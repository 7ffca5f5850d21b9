"""The file seam: real files, files in memory, locks, rolling sequences, an overlay."""
