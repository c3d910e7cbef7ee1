"""Text and ids: tokenizer, text that grows with the tokens, stop strings, chat in and out."""

from paceline.text.chat import ChatPrompt, ChatTemplate
from paceline.text.detokenizer import Detokenizer
from paceline.text.parser import ChatParser, ParsedAnswer, ToolCall, parse_answer
from paceline.text.reasoning import ReasoningBudget
from paceline.text.stops import StopMatcher, StopStrings
from paceline.text.tokenizer import Tokenizer

__all__ = [
    "ChatParser",
    "ChatPrompt",
    "ChatTemplate",
    "Detokenizer",
    "ParsedAnswer",
    "ReasoningBudget",
    "StopMatcher",
    "StopStrings",
    "Tokenizer",
    "ToolCall",
    "parse_answer",
]
