"""No step of the compiled path wakes the threads of torch, which would spin beside its own.

Those threads spin for milliseconds behind the smallest task they are given, on the cores that the
next steps want; a step takes less than one. In a process of its own, with two threads whatever
the machine has.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.ops import numba_cpu

pytestmark = [
    pytest.mark.skipif(not numba_cpu.available(), reason=numba_cpu.why_not()),
    pytest.mark.skipif(
        not Path("/proc/self/task").is_dir(), reason="threads are counted in Linux's /proc"
    ),
]

PROGRAM = """
import os, sys, threading, time
import torch
from paceline import LLM, SamplingParams

def runs():
    "How often threads were given a core that are neither Python's nor the kernels'."
    known = {thread.native_id for thread in threading.enumerate()}
    total = 0
    for task in os.listdir("/proc/self/task"):
        if int(task) not in known:
            with open(f"/proc/self/task/{task}/schedstat") as stat:
                total += int(stat.read().split()[2])
    return total

def asleep():
    "The same, once the threads have spun out: one that runs on is not counted again."
    settled, now = -1, runs()
    while settled != now:
        time.sleep(0.3)
        settled, now = now, runs()
    return now

class Pauses:
    "Drafts in two steps of every 200: a drafter has a window to catch up with."
    def __init__(self):
        self.step = 0
    def choose(self, sequences, *, max_drafts=None):
        self.step += 1
        count = 2 if self.step % 200 < 2 else 0
        return [min(view.limit, count) for view in sequences]
    def observe(self, record):
        pass

def ask(llm, first, length):
    # Prompts over a block's end and more than a window long, the first one twice.
    prompts = [[*range(first + 40 * n, first + 40 * n + 160)] for n in range(4)]
    params = SamplingParams(max_tokens=length, ignore_eos=True)
    llm.generate(prompts[:1], params)
    llm.generate([*prompts, prompts[0]], params)

torch.set_num_threads(2)
torch.zeros(1 << 20).exp()
before = asleep()
torch.zeros(1 << 20).exp()
assert asleep() > before, "torch has no threads to wake"
for options in eval(sys.argv[1]):
    pauses = options.pop("pauses", False)
    llm = LLM(num_threads=2, max_num_seqs=4, max_seq_len=1024, backend="fused", **options)
    if pauses:
        llm.engine.lengths = llm.engine._scheduler.lengths = Pauses()
    ask(llm, 300, 24)
    now = asleep()  # memory is made by now
    ask(llm, 3000, 210 if pauses else 24)
    print(runs() - now)
    llm.close()
"""

OPTIONS = [
    {"num_drafts": 0},
    {"num_drafts": "auto", "pauses": True},
    {"num_drafts": 3, "min_draft_probability": 0.3},
    {"num_drafts": 3, "keep_drafts": 0.6, "mtp_vocab_size": 2048},
]


def test_no_step_wakes_the_threads_of_torch() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, repr(OPTIONS)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0"] * len(OPTIONS)
