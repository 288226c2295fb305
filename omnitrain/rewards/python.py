"""A reward function of the user's own: `module:function`, importable from the working directory."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any


def load(spec: Any) -> Callable[[str, dict], float]:
    """The function that `spec.function` names. The working directory goes first on the module path.

    Raises ImportError if the module or the name is missing, TypeError if it is not callable, and whatever the
    module raises while it is imported.
    """
    cwd = os.getcwd()
    if cwd not in sys.path:
        sys.path.insert(0, cwd)
    module_name, _, path = spec.function.partition(":")
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name and not module_name.startswith(f"{error.name}."):
            raise  # a module that the user's own module imports
        raise ImportError(f"no module named {error.name!r} in {cwd} or among the installed packages") from None
    for name in path.split("."):
        if not hasattr(found, name):
            raise ImportError(f"{module_name} ({getattr(found, '__file__', '?')}) has no {name!r}")
        found = getattr(found, name)
    if not callable(found):
        raise TypeError(f"{spec.function} is a {type(found).__name__}, not a function")
    return found
