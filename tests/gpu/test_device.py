"""What holds on a CUDA device; skipped, with the reason, where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

CUDA = torch.device("cuda")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_plain_torch_on_the_device_equals_the_cpu(tmp_path: Path) -> None:
    from support import make_rig, step_inputs, write_tiny

    from paceline.cache.pools import CachePools
    from paceline.models.deepseek_v4.build import build
    from paceline.models.deepseek_v4.checkpoint import load_weights

    weights = load_weights(write_tiny(tmp_path))
    config = weights.config
    rig = make_rig(weights, config, backend="torch", max_seq_len=512)
    ids = torch.randint(8, 260, (400,), generator=torch.Generator().manual_seed(1)).tolist()
    want, streams = rig.run((0, 0, ids))
    built = build(weights, config, device=CUDA, dtype=torch.float32)
    pools = CachePools.allocate(
        config,
        num_slots=1,
        num_blocks=4,
        max_seq_len=512,
        max_width=512,
        device=CUDA,
        dtype=torch.float32,
    )
    pools.block_tables[0] = torch.arange(1, 5)
    at, logits = 0, []
    for width in (300, 1, 4, 7, 2, 86):
        host = step_inputs(pools, [(0, at, ids[at : at + width])])
        inputs = type(host)(
            **{
                name: value.to(CUDA) if isinstance(value, torch.Tensor) else value
                for name, value in ((f, getattr(host, f)) for f in host.__dataclass_fields__)
            }
        )
        # Any synchronisation of the host inside the forward raises.
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = built.model.forward(inputs, pools)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        logits.append(out.logits.cpu())
        at += width
    assert (torch.cat(logits) - want).abs().max() < 1e-4
    assert streams.shape[0] == 400


@pytest.mark.parametrize(("dtype", "margin"), [("float32", 2e-3), ("bfloat16", 1.5)])
def test_tokens_equal_the_cpus_up_to_near_ties(dtype: str, margin: float) -> None:
    from device import compare, read_prompts

    result = compare(device="cuda", dtype=dtype, num_drafts=3, prompts=read_prompts(8), tokens=240)
    for entry in result["differences"]:
        print(entry)
    assert result["largest_margin"] < margin
    assert len(result["differences"]) <= (2 if dtype == "float32" else 24)


def test_greedy_verify_reads_the_device_once() -> None:
    from paceline.draft import verify

    logits = torch.randn(7, 32, device=CUDA)
    best = logits.argmax(-1).tolist()
    verdicts = verify.greedy(logits, [[best[0], best[1]], [], [best[4] ^ 1, 0]])
    assert [v.num_accepted for v in verdicts] == [2, 0, 0]
    assert [v.next_token for v in verdicts] == [best[2], best[3], best[4]]
