"""The model hub: offline or reachable, and where its files are kept."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from pathlib import Path

from omnitrain.doctor.check import OK, PROBLEM, WARNING, Check, Finding, first_line

_TRUE = ("1", "on", "yes", "true")


def checks() -> list[Check]:
    """The checks of this file."""
    return [Check("hub", hub), Check("hub cache", cache)]


def hub(timeout: float = 5.0) -> Finding:
    """Whether the hub is meant to be used, and if so whether it answers."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE:
        return Finding("hub", OK, "HF_HUB_OFFLINE is set: local directories and the local cache only")
    from huggingface_hub import constants

    try:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        urllib.request.urlopen(request, timeout=timeout).close()
    except urllib.error.HTTPError:
        pass  # an answer, whatever it says, is a hub that can be reached
    except (urllib.error.URLError, OSError, ValueError) as error:
        why = first_line(str(getattr(error, "reason", error)), 80)
        detail = f"{constants.ENDPOINT} cannot be reached ({why}); every load waits for it unless told not to"
        return Finding("hub", WARNING, detail, "export HF_HUB_OFFLINE=1")
    return Finding("hub", OK, f"{constants.ENDPOINT} answers")


def cache() -> Finding:
    """Where downloaded models are kept, and that it can be written."""
    from huggingface_hub import constants

    path = Path(constants.HF_HUB_CACHE)
    there = next(p for p in (path, *path.parents) if p.exists())
    if not os.access(there, os.W_OK):
        return Finding("hub cache", PROBLEM, f"{path} cannot be written", 'export HF_HOME="$HOME/.cache/huggingface"')
    return Finding("hub cache", OK, str(path))
