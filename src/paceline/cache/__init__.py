"""Caches by absolute position: who holds what, the memory, and lengths."""
