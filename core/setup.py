"""Build of the compiled core; everything else is in ``pyproject.toml``."""

from setuptools import Extension, setup

setup(ext_modules=[Extension("librmq_core", ["librmq_core.pyx"], depends=["crc32.h"])])
