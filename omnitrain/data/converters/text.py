"""Reading the text of published data sets."""

from __future__ import annotations

import json
from typing import Any

ENCODING = "utf-8-sig"
"""UTF-8, with or without the byte order mark that some editors write."""


def parse_json(text: str) -> Any:
    """A JSON text's value. Whatever is wrong with it raises JSONDecodeError.

    json.loads itself raises RecursionError for deep nesting, and ValueError for an integer of thousands of digits.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        what = "nested too deep" if isinstance(error, RecursionError) else "a number of too many digits"
        raise json.JSONDecodeError(what, text, 0) from error
