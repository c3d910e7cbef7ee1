"""Lossless speculative decoding for DeepSeek-V4 with its own multi-token-prediction head.

from paceline import LLM, SamplingParams

with LLM() as llm:
    print(llm.generate("def fibonacci(n):", SamplingParams(max_tokens=64))[0].text)
"""

from __future__ import annotations

from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.types import (
    CheckpointError,
    ConfigError,
    FinishReason,
    GenerationError,
    GenerationResult,
    Origin,
    PacelineError,
    RequestError,
    SamplingParams,
    SpeculationStats,
    StreamChunk,
    StreamPiece,
    UnsupportedError,
    Usage,
)

if TYPE_CHECKING:
    from paceline.llm import LLM

__all__ = [
    "LLM",
    "CheckpointError",
    "ConfigError",
    "FinishReason",
    "GenerationError",
    "GenerationResult",
    "Origin",
    "PacelineError",
    "RequestError",
    "SamplingParams",
    "SpeculationStats",
    "StreamChunk",
    "StreamPiece",
    "UnsupportedError",
    "Usage",
    "__version__",
    "bundled_model_path",
]


def bundled_model_path() -> Path:
    """Return the folder of the checkpoint that ships with the package.

    Raises:
        CheckpointError: this installation carries none.
    """
    path = Path(str(resources.files("paceline"))) / "bundled"
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"this installation of paceline carries no model ({path} has no config.json); "
            "give the folder of a checkpoint"
        )
    return path


def __getattr__(name: str) -> Any:
    # Importing torch takes seconds, which `paceline --help` and readers of the types need not wait.
    if name == "LLM":
        from paceline.llm import LLM

        return LLM
    if name == "__version__":
        try:
            return metadata.version("paceline")
        except metadata.PackageNotFoundError:
            return "0+unknown"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
