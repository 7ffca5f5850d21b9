"""Build of the compiled core; everything else is in ``pyproject.toml``.

The extension is optional: where there is no C compiler the installation succeeds, and librmq runs its Python code.
"""

from setuptools import Extension, setup

setup(ext_modules=[Extension("librmq_core", ["librmq_core.pyx"], depends=["crc32.h"], optional=True)])
