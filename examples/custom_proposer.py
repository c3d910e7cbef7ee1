"""A drafter of one's own: repeat what followed the last two tokens the last time.

Four methods suffice, and `check_proposer` says whether they keep the contract.
`python examples/custom_proposer.py [CHECKPOINT]`
"""

import sys
from dataclasses import dataclass

from paceline import LLM, SamplingParams
from paceline.draft import DraftProposer, check_proposer
from paceline.types import Draft, DraftRequest


@dataclass
class Drafted:
    """What is known of one sequence: how many drafts wait for their verdict."""

    count: int = 0


class Echo(DraftProposer[Drafted]):
    """Looks the sequence's last two tokens up in its own past."""

    def alloc_state(self) -> Drafted:
        return Drafted()

    def propose(self, request: DraftRequest, state: Drafted) -> Draft:
        history, tokens = request.history, []
        for at in range(len(history) - 1, 1, -1):
            if history[at - 2 : at] == history[-2:]:
                tokens = history[at : at + request.num_drafts]
                break
        state.count = len(tokens)
        return Draft(tokens=tokens)

    def after_verify(self, num_accepted: int, state: Drafted) -> None:
        if num_accepted > state.count:
            raise ValueError(f"{num_accepted} accepted of {state.count} drafts")
        state.count = 0

    def free_state(self, state: Drafted) -> None:
        state.count = 0

    def prefill_hidden_rows(self, max_seq_len: int) -> int:
        return 0  # it reads tokens only, so the engine need not keep the target's streams


print(check_proposer(Echo, vocab_size=1000), file=sys.stderr)

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
    f"{plain.speculation.num_steps} steps without drafts, {stats.num_steps} with; "
    f"{stats.num_accepted} of {stats.num_drafted} drafts accepted",
    file=sys.stderr,
)
