"""Extension of griffe, which reads the package for the site's reference; ``mkdocs.yml`` names it."""

from __future__ import annotations

import griffe


class Values(griffe.Extension):
    """Hides what an attribute is set to in a method: ``self.route = route`` tells a reader nothing."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: object) -> None:
        """Remove the value of an attribute that only instances have."""
        if attr.labels & {"class-attribute", "instance-attribute"} == {"instance-attribute"}:
            attr.value = None
