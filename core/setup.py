"""Build of the compiled core, and the wheel's bill of materials; everything else is in ``pyproject.toml``."""

import json
from pathlib import Path

import Cython
from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

REASON = """librmq-core can't be built: {}.
No wheel fits this Python, so a C compiler and Python's headers are needed (Debian, Ubuntu: apt install build-essential
python3-dev). librmq does everything without its core: leave out the extra "fast"."""


class Build(build_ext):
    """Says what is missing where nothing can be compiled."""

    def build_extensions(self) -> None:
        try:
            super().build_extensions()
        except (BaseError, CCompilerError) as error:
            raise SystemExit(REASON.format(error)) from error


class Wheel(bdist_wheel):
    """Adds an SBOM (PEP 770): the module contains code of Cython's, in the version that translated it."""

    def egg2dist(self, egginfo_path: str, distinfo_path: str) -> None:
        super().egg2dist(egginfo_path, distinfo_path)
        name, version, licence = "librmq-core", self.distribution.get_version(), {"license": {"id": "Apache-2.0"}}
        parts = [
            {"type": "library", "name": name, "version": version, "purl": f"pkg:pypi/{name.lower()}@{version}"}
            | {"bom-ref": name.lower(), "licenses": [licence]}
            for name, version in ((name, version), ("Cython", Cython.__version__))
        ]
        document = {
            "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
            "bomFormat": "CycloneDX",
            "specVersion": "1.6",
            "version": 1,
            "metadata": {"component": parts[0]},
            "components": parts[1:],
            "dependencies": [{"ref": name, "dependsOn": ["cython"]}, {"ref": "cython"}],
        }
        file = Path(distinfo_path, "sboms", f"{name}.cdx.json")
        file.parent.mkdir()
        file.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


setup(
    ext_modules=[Extension("librmq_core", ["librmq_core.pyx"], depends=["crc32.h"])],
    cmdclass={"build_ext": Build, "bdist_wheel": Wheel},
)
