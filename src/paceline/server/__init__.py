"""The HTTP server: an OpenAI-compatible door before one engine."""
