"""Sites: brokers and clients belong to the site that their name begins with (``hz-broker-a``, ``hz-10.0.0.1@pay``).

The name of a site has letters and digits only. Names of another form, such as ``10.0.0.1@pay``, have no site.
"""

from __future__ import annotations

from librmq.errors import ConfigError


def site_of(name: str) -> str | None:
    """Return the site of a broker's name or a client id, the text before its first ``-``; None without a site."""
    site, dash, _ = name.partition("-")
    return site if dash and site.isalnum() else None


def check_site(site: object) -> None:
    """Refuse a site name that cannot begin an id.

    Raises:
        ConfigError: The site has other characters than letters and digits.
    """
    if not isinstance(site, str) or not site.isalnum():
        raise ConfigError(f"site: expected letters and digits, found {site!r:.80}")
