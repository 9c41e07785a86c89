"""Orderly stops: the first SIGINT or SIGTERM is a request, a second one acts as usual."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def on_first_signal(act: Callable[[], None]) -> Iterator[None]:
    """Calls `act` in the main thread at the first SIGINT or SIGTERM; only inside the block, and only if entered there.

    `act` must not wait for a lock, since the main thread may hold it.
    """
    previous: dict[int, Any] = {}

    def receive(number: int, frame: FrameType | None) -> None:
        restore()
        act()

    def restore() -> None:
        while previous:
            signal.signal(*previous.popitem())

    if threading.current_thread() is threading.main_thread():
        previous.update({number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)})
    try:
        yield
    finally:
        restore()
