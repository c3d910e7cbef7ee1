"""Text and ids: the tokenizer, and text that grows with the tokens."""

from paceline.text.detokenizer import Detokenizer
from paceline.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "Tokenizer"]
