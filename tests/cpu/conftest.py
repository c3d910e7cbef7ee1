from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support import write_tiny

from paceline.models.deepseek_v4.checkpoint import Weights, load_weights


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c() -> None:
    # What a shell starts in the background ignores Ctrl-C, and so would all that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def tiny_weights(tiny_path: Path) -> Weights:
    return load_weights(tiny_path)


@pytest.fixture(scope="session")
def tiny_reference(tiny_path: Path) -> Any:
    """transformers' model of the tiny checkpoint, fp32."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    model = transformers.DeepseekV4ForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="session", params=["torch", "fused"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "fused":
        from paceline.ops import numba_cpu

        if not numba_cpu.available():
            pytest.skip(numba_cpu.why_not())
    return str(request.param)
