"""Which CPU work runs on how many threads.

PyTorch splits every operation of more than 32 Ki elements over its threads and waits for all of them. In loops of many
small operations the waiting costs more than the work, by a hundredfold on a busy machine. Such loops run on one thread
each here; where there are many independent pieces, the pieces are shared out instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Piece = TypeVar("Piece")


@contextmanager
def one_thread() -> Iterator[None]:
    """Run CPU kernels on one core, then restore the setting."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def share_out(work: Callable[[Piece], None], pieces: Sequence[Piece]) -> None:
    """Call work on every piece, as many at once as PyTorch may use threads. No piece may touch another's results."""
    threads = min(torch.get_num_threads(), len(pieces))
    with one_thread():
        if threads <= 1:
            for piece in pieces:
                work(piece)
            return
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as workers:
            for _ in workers.map(work, pieces):
                pass
