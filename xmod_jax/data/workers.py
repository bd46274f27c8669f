"""Work spread over processes that end with the process that started them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from typing import Any

from xmod_jax.errors import UserError

_POLL_S = 0.2
_ORPHANED = 3  # status of a worker whose parent is gone


def spread(
    function: Callable[..., None],
    work: Sequence[tuple[Any, ...]],
    count: int,
    tell: Callable[[Any], None],
    ended: Callable[[], None],
) -> None:
    """Calls ``function(*item, tell)`` for every item of `work`, in `count` processes.

    Args:
      function: of a module, so that it can be named to another process.
      work: arguments of each call.
      count: processes; 1 for this one.
      tell: called here with whatever a call tells.
      ended: called here after each call.

    Raises:
      UserError: a process was killed; and whatever a call raises, once the others have ended.
    """
    if count == 1:
        for item in work:
            function(*item, tell)
            ended()
        return
    context = multiprocessing.get_context("spawn")
    parts = context.Queue()
    others = set(multiprocessing.active_children())
    pool = concurrent.futures.ProcessPoolExecutor(count, context, _start, (parts,))
    try:
        waiting = {pool.submit(_call, function, item) for item in work}
        while waiting:
            done, waiting = concurrent.futures.wait(
                waiting, _POLL_S, concurrent.futures.FIRST_COMPLETED
            )
            for part in _waiting_parts(parts):
                tell(part)
            for future in done:
                future.result()
                ended()
    except concurrent.futures.process.BrokenProcessPool as error:
        raise UserError(
            "a worker process was killed (out of memory?): start again, with fewer --workers"
        ) from error
    except KeyboardInterrupt:  # anything else waits for what the others have begun
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    for part in _waiting_parts(parts):  # told just before the last calls ended
        tell(part)


def leave_if_orphaned() -> None:
    """Ends a worker whose parent is gone; nothing in any other process.

    Called before anything gets its final name: another command may own the folder by then.
    """
    parent = multiprocessing.parent_process()
    if _parts is not None and parent is not None and not parent.is_alive():
        os._exit(_ORPHANED)


_parts: Any = None  # of a worker process: where it tells its progress


def _start(parts: Any) -> None:
    global _parts
    _parts = parts
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, which tells the parent as well
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])  # a pipe that closes however the parent ends
    os._exit(_ORPHANED)


def _call(function: Callable[..., None], item: tuple[Any, ...]) -> None:
    function(*item, _parts.put)


def _waiting_parts(parts: Any) -> Iterator[Any]:
    with contextlib.suppress(queue.Empty):
        while True:
            yield parts.get_nowait()
