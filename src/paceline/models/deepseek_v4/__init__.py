"""DeepSeek-V4: the trunk, its multi-token-prediction head, and reading their checkpoints."""
