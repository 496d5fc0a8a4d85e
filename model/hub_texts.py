"""Rows of a data set on the hub, through the `datasets` library."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from glm5_quant.model.errors import UserError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")


def looks_like_hub_id(name: str) -> bool:
    """Whether a name that is no path could be `name`, `owner/name` or `owner/name:config`."""
    return _HUB_ID.fullmatch(name) is not None and ".." not in name


def hub_rows(name: str, split: str) -> Iterator[tuple[int, Any]]:
    """Yield (number, row) of a hub data set. Code that a data set brings along is never run (`datasets` 4 dropped it).

    Raises UserError when the data set cannot be had, which offline means: is not in the local cache.
    """
    import datasets

    repo, _, config = name.partition(":")
    try:
        data = datasets.load_dataset(repo, config or None, split=split)
    except Exception as error:  # the library raises a dozen unrelated types: network, cache, split, config, format
        raise UserError(
            f"neither a path here nor a data set that could be fetched (split {split})",
            file=name,
            found=f"{type(error).__name__}: {_first_line(error)}",
            expected="a file, a folder or a hub data set id",
            hint="Without a network, download it elsewhere and pass the folder",
        ) from error
    yield from enumerate(data, start=1)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0].rstrip(".")
