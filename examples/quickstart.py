"""Complete a text. `python examples/quickstart.py [CHECKPOINT]`"""

import sys

from paceline import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else None
with LLM(model) as llm:
    (result,) = llm.generate("def fibonacci(n):", SamplingParams(max_tokens=48))

print(result.text)
print(f"{result.speculation.mean_acceptance_length:.2f} tokens per step", file=sys.stderr)
