"""Part of librmq's build: compiles the core into the wheel where it can, and writes the wheel's bill of materials.

``LIBRMQ_CORE`` decides: ``on`` fails the build where the core can't be compiled, ``off`` makes a wheel of Python code
for any platform. Unset, the core is compiled where a C compiler and Python's headers are there; elsewhere the wheel is
pure Python, with a warning, and `librmq doctor` shows which code runs.
"""

import json
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MODULE = "librmq.runtime._core"
SCHEMA = {"$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json", "bomFormat": "CycloneDX", "specVersion": "1.6"}


class CoreBuildHook(BuildHookInterface[Any]):
    """Adds the compiled module to a wheel, or to an editable installation."""

    def dependencies(self) -> list[str]:
        """Return the packages that translate and compile the core."""
        return ["Cython>=3.1", "setuptools>=77"] if self.is_wanted() else []

    def is_wanted(self) -> bool:
        """Return whether this build tries to compile; without the interpreter's lock librmq runs Python code."""
        mode = os.environ.get("LIBRMQ_CORE", "")
        if mode not in ("", "on", "off"):
            raise SystemExit(f"LIBRMQ_CORE is {mode!r}, and must be 'on', 'off' or unset")
        is_usual = os.name == "posix" and not sysconfig.get_config_var("Py_GIL_DISABLED")
        return mode == "on" or (mode == "" and is_usual)

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile in a new folder, so that a failed build never ships the module of an earlier one."""
        self.folder = tempfile.TemporaryDirectory()
        place = Path(*MODULE.split(".")).with_suffix(sysconfig.get_config_var("EXT_SUFFIX"))
        in_checkout = Path(self.root, place)
        if version == "editable":
            in_checkout.unlink(missing_ok=True)
        components = [self.component("librmq", self.metadata.version)]
        if self.is_wanted():
            try:
                module = self.compile(Path(self.folder.name))
            except (Exception, SystemExit) as error:  # setuptools, Cython and the compiler each have their own
                reason = f"the compiled core of librmq can't be built: {error}"
                advice = "It takes a C compiler and Python's headers (Debian, Ubuntu: build-essential python3-dev)."
                if os.environ.get("LIBRMQ_CORE") == "on":
                    raise SystemExit(f"{reason}\n{advice} LIBRMQ_CORE=off builds librmq without it.") from error
                self.app.display_warning(f"{reason}\n{advice} librmq does everything without it, more slowly.")
            else:
                import Cython

                if version == "editable":  # the package is imported from the checkout, so its module stands there too
                    shutil.copy(module, in_checkout)
                else:
                    build_data["force_include"][str(module)] = str(place)
                build_data.update(pure_python=False, infer_tag=True)
                components.append(self.component("Cython", Cython.__version__))
        self.write_materials(components, build_data)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the folder once the wheel has its files."""
        self.folder.cleanup()

    def compile(self, folder: Path) -> Path:
        """Return the compiled module, made below the folder from the sources alone."""
        from Cython.Build import cythonize
        from setuptools import Distribution, Extension

        source = Path(self.root, "core", "librmq_core.pyx")
        extension = Extension(MODULE, [os.path.relpath(source)], include_dirs=[str(source.parent)])
        translated = cythonize([extension], build_dir=str(folder / "c"), force=True, quiet=True)
        command = Distribution({"name": MODULE, "ext_modules": translated}).get_command_obj("build_ext")
        command.build_lib, command.build_temp, command.force = str(folder / "lib"), str(folder / "o"), True
        command.ensure_finalized()
        command.run()
        (module,) = (folder / "lib").rglob("_core.*")
        return module

    def component(self, name: str, version: str) -> dict[str, Any]:
        """Return a package's entry in the bill of materials."""
        url = f"pkg:pypi/{name.lower()}@{version}"
        entry = {"type": "library", "bom-ref": name.lower(), "name": name, "version": version, "purl": url}
        return {**entry, "licenses": [{"license": {"id": "Apache-2.0"}}]}

    def write_materials(self, components: list[dict[str, Any]], build_data: dict[str, Any]) -> None:
        """Add the bill of materials (PEP 770): a compiled module contains code of the Cython that translated it."""
        names = [component["bom-ref"] for component in components]
        relations = [{"ref": names[0], "dependsOn": names[1:]}, *({"ref": name} for name in names[1:])]
        document = {**SCHEMA, "version": 1, "metadata": {"component": components[0]}}
        document |= {"components": components[1:], "dependencies": relations}
        file = Path(self.folder.name, "librmq.cdx.json")
        file.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        build_data["sbom_files"].append(str(file))
