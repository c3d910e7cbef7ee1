"""How often drafts are accepted, by kind of text. `python examples/acceptance.py [CHECKPOINT]`"""

import sys

from paceline import LLM, SamplingParams
from paceline.types import SpeculationStats

KINDS = {
    "code": ["def read_lines(path):\n", "for i in range(10):\n", "class Node:\n    def __init__("],
    "prose": ["The module provides", "This function returns a list of", "If the argument is"],
    "data": ['{"name": "a", "size": 1}\n{"name": ', "x = [1, 2, 3, 4, ", "a,b,c\n1,2,3\n4,"],
}

model = sys.argv[1] if len(sys.argv) > 1 else None
params = SamplingParams(max_tokens=64, ignore_eos=True)
with LLM(model, num_drafts=3) as llm:
    for kind, prompts in KINDS.items():
        total = SpeculationStats()
        for result in llm.generate(prompts, params):
            total.add(result.speculation)
        print(f"{kind:6} {total.mean_acceptance_length:.2f} tokens per step")
        for position, share in enumerate(total.acceptance_by_position, 1):
            print(f"       draft {position}: {'#' * round(40 * share):40} {share:.0%}")
