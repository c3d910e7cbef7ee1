"""Drafts off and on, through the same path: equal tokens, fewer steps.

`python examples/compare_speculation.py [CHECKPOINT]`
"""

import sys
import time

from paceline import LLM, SamplingParams

PROMPTS = ["def fibonacci(n):\n", "class Stack:\n    def push(self, item):\n", "import json\n"]

model = sys.argv[1] if len(sys.argv) > 1 else None
# Without the cache of prefixes: every number of drafts reads its prompts itself.
with LLM(model, prefix_cache=False) as llm:
    tokens = {}
    for num_drafts in (0, 1, 2, 3):
        params = SamplingParams(max_tokens=64, ignore_eos=True, num_drafts=num_drafts)
        llm.generate(PROMPTS[0], params)  # warm up
        started = time.perf_counter()
        results = [llm.generate(prompt, params)[0] for prompt in PROMPTS]
        seconds = time.perf_counter() - started
        tokens[num_drafts] = [result.token_ids for result in results]
        count = sum(map(len, tokens[num_drafts]))
        steps = sum(result.speculation.num_steps for result in results)
        print(f"{num_drafts} drafts: {count} tokens in {steps} steps, {count / seconds:.0f} tok/s")

    assert all(ids == tokens[0] for ids in tokens.values()), "drafts must not change a token"
    print("every token is equal")
