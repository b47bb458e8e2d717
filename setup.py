"""Computes the package list; everything else stands in pyproject.toml.

The import package `dovetail` is made of several folders: `core/` is the package itself, each other folder a
sub-package. A hand-kept list would silently drop a forgotten sub-package from wheels.
"""

from setuptools import find_packages, setup

FOLDERS = {
    "dovetail": "core",
    "dovetail.plugins": "plugins",
    "dovetail.attention_backends": "attention_backends",
    "dovetail.executors": "executors",
    "dovetail.schedulers": "schedulers",
    "dovetail.spec_decode": "spec_decode",
    # Not `vllm`: from the root of a checkout, `import vllm` must still mean vLLM.
    "dovetail.vllm": "vllm_names",
}

packages = []
for name, folder in FOLDERS.items():
    packages += [name, *(f"{name}.{sub}" for sub in find_packages(folder))]

setup(packages=packages, package_dir=dict(FOLDERS))
