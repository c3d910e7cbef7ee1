"""A drafter of one's own: repeat what followed the last two tokens the last time.

Four methods suffice. `python examples/custom_proposer.py [CHECKPOINT]`
"""

import sys

from paceline import LLM, SamplingParams
from paceline.draft import DraftProposer
from paceline.types import Draft, DraftRequest


class Echo(DraftProposer[None]):
    """Looks the sequence's last two tokens up in its own past; keeps no state."""

    def alloc_state(self) -> None:
        return None

    def propose(self, request: DraftRequest, state: None) -> Draft:
        history = request.history
        for at in range(len(history) - 2, 1, -1):
            if history[at - 2 : at] == history[-2:]:
                return Draft(tokens=history[at : at + request.num_drafts])
        return Draft(tokens=[])

    def after_verify(self, num_accepted: int, state: None) -> None:
        pass

    def free_state(self, state: None) -> None:
        pass


PROMPT = "a = 1\nb = 2\nc = 3\nd = 4\ne = 5\n"

model = sys.argv[1] if len(sys.argv) > 1 else None
params = SamplingParams(max_tokens=64, ignore_eos=True)
with LLM(model, num_drafts=0) as llm:
    (plain,) = llm.generate(PROMPT, params)
with LLM(model, proposer=Echo(), num_drafts=4) as llm:
    (drafted,) = llm.generate(PROMPT, params)

assert drafted.token_ids == plain.token_ids, "drafts must not change a token"
print(drafted.text)
stats = drafted.speculation
print(
    f"{plain.speculation.num_steps} steps without drafts, {stats.num_steps} with", file=sys.stderr
)
print(f"{stats.num_accepted} of {stats.num_drafted} drafts accepted", file=sys.stderr)
