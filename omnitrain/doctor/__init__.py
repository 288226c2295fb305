"""What is wrong with this machine, and the line that mends it. One file per group of checks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omnitrain.doctor.check import Check
    from omnitrain.recipe.loader import Loaded


def all_checks(loaded: Loaded | None = None, *, quick: bool = False, where: Path = Path("runs")) -> list[Check]:
    """Every check in the order of the report, those of a recipe if one is given. `quick` leaves out the processes.

    where: the directory that runs are written to.
    """
    from omnitrain.doctor import engine, environment, hub, media, ranks, recipe, resources

    listed = [*environment.checks(), *resources.checks(where), *media.checks(), *hub.checks()]
    if loaded is not None:
        listed += recipe.checks(loaded)
    if not quick:
        listed += [*environment.import_checks(), *ranks.checks(), *engine.checks()]
    return listed
