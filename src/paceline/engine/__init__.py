"""The engine: schedule, draft, run, verify, commit."""

from paceline.engine.engine import Emission, Engine

__all__ = ["Emission", "Engine"]
