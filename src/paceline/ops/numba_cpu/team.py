"""Threads that share the compiled step's tasks with the thread that asks for it."""

from __future__ import annotations

import os
import threading
import weakref

import numpy as np
import numpy.typing as npt

from paceline.ops.numba_cpu.kernels import step_entry
from paceline.ops.numba_cpu.layout import CONTROL_WORDS, Control
from paceline.types import ConfigError

__all__ = ["Team", "default_threads", "shared_team"]

_MOST_THREADS = 64


def default_threads() -> int:
    """Two where there are two cores to use: more gain little at one row."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(2, cores or 1)


class Team:
    """The calling thread and `num_threads` - 1 helpers.

    Helpers wait for work in compiled code for a moment, then sleep until woken. A helper that
    comes late or not at all costs no correctness: whoever is there takes the tasks.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._step = step_entry()
        self._words = np.zeros(CONTROL_WORDS + 8, np.int64)
        start = -(self._words.ctypes.data // 8) % 8
        self._control = self._words[start : start + CONTROL_WORDS]
        self._address = int(self._control.ctypes.data)
        self._control[Control.THREADS] = num_threads
        self._busy = threading.Lock()
        self._helpers = [_Helper(self._words, self._address, n) for n in range(1, num_threads)]
        weakref.finalize(self, _stop, self._control, self._helpers)

    def run(self, job: npt.NDArray[np.int64]) -> None:
        """Run a job to its end; one at a time."""
        with self._busy:
            self._control[Control.JOB] = job.ctypes.data
            for helper in self._helpers:
                helper.wake()
            self._step(self._address, 0)


class _Helper:
    def __init__(self, words: npt.NDArray[np.int64], address: int, number: int) -> None:
        self._words = words  # Keeps the shared words alive as long as the thread runs.
        self._address = address
        self._number = number
        self._asleep = False
        self._alarm = threading.Semaphore(0)
        self._step = step_entry()
        threading.Thread(target=self._work, name=f"paceline-{number}", daemon=True).start()

    def wake(self) -> None:
        """Let a sleeping helper look for work."""
        if self._asleep:
            self._asleep = False
            self._alarm.release()

    def _work(self) -> None:
        while not self._step(self._address, self._number):
            self._asleep = True
            self._alarm.acquire()


def _stop(control: npt.NDArray[np.int64], helpers: list[_Helper]) -> None:
    control[Control.STOP] = 1
    for helper in helpers:
        helper.wake()


_teams: weakref.WeakValueDictionary[int, Team] = weakref.WeakValueDictionary()
_teams_lock = threading.Lock()


def shared_team(num_threads: int | None) -> Team:
    """The team of so many threads; all models of a process that want as many share it.

    Raises:
        ConfigError: the number is out of range.
    """
    count = default_threads() if num_threads is None else num_threads
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MOST_THREADS:
        raise ConfigError(f"num_threads is {count!r}; allowed is an integer 1 to {_MOST_THREADS}")
    with _teams_lock:
        team = _teams.get(count)
        if team is None:
            team = _teams[count] = Team(count)
        return team
