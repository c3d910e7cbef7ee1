"""From logits to tokens: processors, shared noise, acceptance rules and log-probabilities.

`request.Sampler` is what a request holds; the rest are pure functions it is made of.
"""
