"""Computes the package list; everything else stands in pyproject.toml.

The import package `dovetail` is made of several folders, listed in pyproject.toml under [tool.dovetail.folders]. A
hand-kept list of packages would silently drop a forgotten sub-package from wheels.
"""

import sys
import tomllib
from pathlib import Path

from setuptools import find_namespace_packages, setup

# The built documentation is data of its command.
EXCLUDED = ["*__pycache__*", "commands.docs.built-site", "commands.docs.built-site.*"]

folders = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text())["tool"]["dovetail"]["folders"]
packages = []
for name, folder in folders.items():
    packages += [name, *(f"{name}.{sub}" for sub in find_namespace_packages(folder, exclude=EXCLUDED))]

built_site = Path(__file__).with_name("plugins") / "commands" / "docs" / "built-site" / "index.html"
if "bdist_wheel" in sys.argv and not built_site.is_file():
    print("warning: this wheel will have no documentation for `dovetail docs`: run `make wheel`", file=sys.stderr)

setup(packages=packages, package_dir=folders)
