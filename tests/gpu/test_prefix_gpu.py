"""Kept prefixes on a GPU: what is restored is what was left, and a hit goes on as a cold run."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_second_turn_goes_on_from_what_was_kept(num_drafts: int, graphs: bool) -> None:
    from paceline import LLM, SamplingParams

    options: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "num_drafts": num_drafts,
        "max_num_seqs": 2,
        "max_seq_len": 1024,
        "graphs": graphs,
    }
    rng = random.Random(3)
    prompt = [rng.randrange(300, 4000) for _ in range(200)]
    params = SamplingParams(max_tokens=90, ignore_eos=True)
    with LLM(**options) as warm, LLM(prefix_cache=False, **options) as cold:
        (first,) = warm.generate([prompt], params)
        whole = [*prompt, *first.token_ids, *prompt[:9]]
        here, there = (llm.generate([whole], params)[0] for llm in (warm, cold))
        assert first.usage.cached_tokens == there.usage.cached_tokens == 0
        assert here.usage.cached_tokens == 256
        # Rows of other pieces round otherwise, so that a near tie may fall the other way at last.
        same = [a == b for a, b in zip(here.token_ids, there.token_ids, strict=True)]
        assert all(same[:20])
        for llm in (warm, cold):
            assert llm.engine.num_proposer_failures == 0
            llm.engine.check_idle()
        warm.engine.clear_prefix_cache()
        warm.engine.check_idle()


def test_rings_come_back_bit_for_bit() -> None:
    from paceline import bundled_model_path
    from paceline.cache.pools import CachePools
    from paceline.cache.snapshot import RingSnapshot
    from paceline.config import ModelConfig

    config = ModelConfig.from_path(bundled_model_path())
    pools = CachePools.allocate(
        config,
        num_slots=2,
        num_blocks=2,
        max_seq_len=1024,
        max_width=60,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
    )
    names = ("window", "raw4_kv", "raw4_score", "index_raw_kv", "index_raw_score")
    for name in names:
        getattr(pools, name).normal_()
    taken = RingSnapshot.take(pools, 0, 384, window=config.sliding_window)
    taken.restore(pools, 1)
    for name in names:
        ring = getattr(pools, name)
        back = torch.arange(384 - (127 if name == "window" else 4), 384, device="cuda")
        back %= ring.shape[2]
        assert torch.equal(ring[:, 0][:, back], ring[:, 1][:, back])
