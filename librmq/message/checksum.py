"""The checksum of bodies: CRC-32 by ISA-L if the package ``isal`` is installed (extra ``fast``), else by zlib.

Both give the same results.
"""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32
