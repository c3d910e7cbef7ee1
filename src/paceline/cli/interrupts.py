"""Ctrl-C in a program that goes on: where it ends a wait, and where it is only noted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupts", "woken"]

_WAKE_SECONDS = 0.1


class Interrupts:
    """Ctrl-C as the end of an answer.

    Inside `held` it is noted and nothing is torn down half way, however often it comes; `check`
    raises it, and inside `ends` it is raised at once. It stays noted until `forget`. Where somebody
    else ignores or handles Ctrl-C, all of this does nothing; where somebody handles the alarm
    signal, nothing is woken.
    """

    def __init__(self) -> None:
        self._came = False
        self._ends = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Note Ctrl-C."""
        if not _on_main_thread() or signal.getsignal(signal.SIGINT) is not _RAISE:
            yield
            return
        signal.signal(signal.SIGINT, self._note)
        if hasattr(signal, "setitimer") and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
            # For good: an alarm may still be under way when its timer is stopped, and would end
            # the process were the handler gone.
            signal.signal(signal.SIGALRM, _do_nothing)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, _RAISE)

    @contextmanager
    def ends(self, *, restarts: bool = False) -> Iterator[None]:
        """Let Ctrl-C end what waits within; it must be safe to leave anywhere.

        Args:
            restarts: as of `woken`.

        Raises:
            KeyboardInterrupt: Ctrl-C is noted, or comes.
        """
        self._ends = True
        try:
            self.check()
            with woken(restarts=restarts):
                yield
        finally:
            self._ends = False

    def check(self) -> None:
        """Raise what came.

        Raises:
            KeyboardInterrupt: Ctrl-C is noted.
        """
        if self._came:
            raise KeyboardInterrupt

    def forget(self) -> None:
        """Note no more what came so far."""
        self._came = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Stays noted: where a destructor is interrupted, Python drops what is raised.
        self._came = True
        if self._ends:
            self._ends = False
            raise KeyboardInterrupt


@contextmanager
def woken(*, restarts: bool = False) -> Iterator[None]:
    """Interrupt what blocks, ten times a second, so that a signal which came before is seen.

    Python looks for signals when a call is interrupted. One that comes when a call is about to
    block does not interrupt it, and would wait for the next key or byte. Does nothing where
    `Interrupts.held` did not prepare for it.

    Args:
        restarts: let reads and writes go on in the kernel, and interrupt only `select` and its
            like. Readline waits with these, and may lose output where a write is interrupted.
    """
    can = hasattr(signal, "setitimer") and _on_main_thread()
    # A timer that runs is somebody else's, and wakes as well.
    if (
        not can
        or signal.getsignal(signal.SIGALRM) is not _do_nothing
        or signal.getitimer(signal.ITIMER_REAL)[0]
    ):
        yield
        return
    signal.siginterrupt(signal.SIGALRM, not restarts)
    signal.setitimer(signal.ITIMER_REAL, _WAKE_SECONDS, _WAKE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


_RAISE = signal.default_int_handler


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
