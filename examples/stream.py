"""Several prompts at once, printed as they grow. `python examples/stream.py [CHECKPOINT]`"""

import sys

from paceline import LLM, SamplingParams

PROMPTS = ["import os\n", "class Queue:\n", "The function returns"]

model = sys.argv[1] if len(sys.argv) > 1 else None
with LLM(model) as llm:
    for chunk in llm.stream(PROMPTS, SamplingParams(max_tokens=32)):
        # Tokens that were drafted and accepted stand in brackets.
        for text, drafted in chunk.pieces:
            print(chunk.index, f"[{text!r}]" if drafted else repr(text))
        if chunk.result is not None:
            print(chunk.index, "ended:", chunk.result.finish_reason)
