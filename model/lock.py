"""One run at a time in a folder that is written: two would write the same files over each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from glm5_quant.model.errors import UserError

try:
    import fcntl
except ImportError:  # Windows has none; there runs are not kept apart.
    fcntl = None  # type: ignore[assignment]

CALIBRATION, EXPORT = ".calibration.lock", ".glm5-quant-export.lock"


@contextmanager
def only_run(folder: Path, name: str, *, instead: str) -> Iterator[None]:
    """Hold the lock file `name` in `folder`; the lock goes with the process, however that ends.

    instead: what a user who is refused may do, such as "use another --work-dir".

    Raises:
        UserError: another run holds it, or the folder cannot be written.
    """
    if fcntl is None:
        yield
        return
    path = folder / name
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            problem = f"cannot be written ({error.strerror})"
            raise UserError(problem, file=folder, hint=instead.capitalize()) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip()
            os.close(descriptor)
            hint = f"Wait for it, stop it, or {instead}"
            raise UserError(f"another run (process {holder}) is working here", file=folder, hint=hint) from None
        except OSError:  # a file system without locks
            break
        # Whoever held it before may have taken the file away in between.
        with suppress(OSError):
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                break
        os.close(descriptor)
    try:
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)
