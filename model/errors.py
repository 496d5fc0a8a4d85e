"""The one error that users see: file, item, what was found, what was expected, and what to do; sizes in its words."""

from __future__ import annotations

from pathlib import Path

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class UserError(ValueError):
    """Something outside is wrong: a file, a config value, a name, a setting.

    The command line prints it as one message and exits with code 1. Keyword fields make the message; `hint` says what
    to do next.
    """

    def __init__(
        self,
        problem: str,
        *,
        file: Path | str | None = None,
        item: str | None = None,
        found: object = None,
        expected: object = None,
        hint: str | None = None,
    ) -> None:
        self.problem, self.file, self.item = problem, file, item
        self.found, self.expected, self.hint = found, expected, hint
        where = ": ".join(str(part) for part in (file, item) if part is not None)
        text = f"{where}: {problem}" if where else problem
        if found is not None:
            text += f"; found {found}"
        if expected is not None:
            text += f"; expected {expected}"
        if hint is not None:
            text += f". {hint}"
        super().__init__(text)


def human_bytes(count: float) -> str:
    """`17.2 MiB`; powers of 1024."""
    size, unit = float(count), 0
    while abs(size) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"
