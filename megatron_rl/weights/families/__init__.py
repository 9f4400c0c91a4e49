"""The supported model families, one file each. To add one, write a file here that defines FAMILY."""

import importlib
import pkgutil

from megatron_rl.weights.family import Family

_MODULES = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in _MODULES}
"""{name of a family, as in `Architecture.family`: the Family}."""
