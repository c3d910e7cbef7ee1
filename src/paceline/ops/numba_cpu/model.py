"""The target, the draft block and the dense tables on compiled loops; fp32 on a CPU.

Each object owns its packed weights, its scratch and one job (see `layout`); a forward writes the
step's addresses into the job and has the team run it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.cache.drafter import DrafterRing
from paceline.cache.pools import CachePools
from paceline.config import ModelConfig
from paceline.models.step import MtpInputs, MtpOutput, StepInputs, TargetOutput
from paceline.ops.dense import DenseWeight
from paceline.ops.numba_cpu.layout import JOB_WORDS, Job, Kind, Layer
from paceline.ops.numba_cpu.pack import (
    Arena,
    Packed,
    aligned_bytes,
    pack_experts,
    pack_grouped,
    pack_matrix,
    pack_mixer,
    pack_pairs,
    pack_quarters,
)
from paceline.ops.numba_cpu.simd import BF16, FP32
from paceline.ops.numba_cpu.team import Team, shared_team
from paceline.ops.reference import rotary_frequencies
from paceline.types import ConfigError

__all__ = ["FusedDense", "FusedModel", "FusedMtpBlock"]

_FIRST_ANGLES = 8192
_NOT_RUN = -2
_CHUNK = 512
_TILE_BYTES = 4 * 64 * 8
_MOST_TOLD = 64


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class _Angles:
    """Rotary tables [positions, cosines rd, signed sines rd] that grow with the positions asked."""

    def __init__(self, config: ModelConfig, *, compressed: bool) -> None:
        self._freqs = rotary_frequencies(config, compressed=compressed)
        self.positions = 0
        self.table = np.zeros(0, np.float32)
        self.cover(min(config.max_position_embeddings, _FIRST_ANGLES))

    def cover(self, positions: int) -> bool:
        """Make the table hold so many positions; whether it moved."""
        if positions <= self.positions:
            return False
        positions = _round_up(max(positions, 2 * self.positions), 128)
        angles = torch.arange(positions).float()[:, None] * self._freqs
        cos, sin = angles.cos(), angles.sin()
        table = torch.cat((torch.stack((cos, cos), -1), torch.stack((-sin, sin), -1)), 1)
        self.table = table.contiguous().numpy().reshape(-1)
        self.positions = positions
        return True


class _Fused:
    """What target and draft block share: weights of layers, scratch, job."""

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        config: ModelConfig,
        *,
        kind: Kind,
        team: Team,
    ) -> None:
        self.config = config
        self._weights = weights
        self._team = team
        self._job = np.zeros(JOB_WORDS, np.int64)
        self._kept: list[object] = []
        self._arena = Arena()
        self._rows = self._cap = self._picked = 0
        self._stride = 0
        c = config
        self._floats = np.array(
            [
                c.rms_norm_eps,
                c.hc_eps,
                c.routed_scaling_factor,
                c.swiglu_limit,
                c.head_dim**-0.5,
                c.index_head_dim**-0.5 * c.index_n_heads**-0.5,
                -math.inf,
            ],
            np.float32,
        )
        job = self._job
        job[Job.KIND] = kind
        job[Job.HIDDEN] = c.hidden_size
        job[Job.HEADS] = c.num_attention_heads
        job[Job.HEAD_DIM] = c.head_dim
        job[Job.ROPE] = c.qk_rope_head_dim
        job[Job.Q_LORA] = c.q_lora_rank
        job[Job.GROUPS] = c.o_groups
        job[Job.O_LORA] = c.o_lora_rank
        job[Job.WINDOW] = c.sliding_window
        job[Job.INDEX_HEADS] = c.index_n_heads
        job[Job.INDEX_DIM] = c.index_head_dim
        job[Job.INDEX_TOPK] = c.index_topk
        job[Job.EXPERTS] = c.n_routed_experts
        job[Job.PICKS] = c.num_experts_per_tok
        job[Job.INNER] = c.moe_intermediate_size
        job[Job.SINKHORN] = c.hc_sinkhorn_iters
        job[Job.VOCAB] = c.vocab_size
        job[Job.FLOATS] = self._floats.ctypes.data
        self._chain_jobs: list[npt.NDArray[np.int64]] = []
        self._plain = _Angles(config, compressed=False)
        self._long = _Angles(config, compressed=True) if kind == Kind.TARGET else None
        self._point_at_angles()

    # ------------------------------------------------------------------------------ weights

    def _array(self, values: npt.NDArray[np.float32] | torch.Tensor) -> int:
        """Keep fp32 values; their address."""
        if isinstance(values, torch.Tensor):
            values = values.detach().float().reshape(-1).numpy()
        kept = np.ascontiguousarray(values, np.float32)
        self._kept.append(kept)
        return int(kept.ctypes.data)

    def _vector(self, name: str, *, unit: int = 1) -> int:
        values = self._weights[name].detach().float().reshape(-1).numpy()
        return self._array(np.pad(values, (0, -values.size % unit)))

    def _keep(self, packed: Packed) -> tuple[int, int]:
        self._kept.append(packed.data)
        return packed.address, packed.form

    def _mixer(self, prefix: str) -> tuple[int, int]:
        data, affine = pack_mixer(
            self._weights[f"{prefix}_fn"],
            self._weights[f"{prefix}_base"],
            self._weights[f"{prefix}_scale"],
        )
        self._kept.append(data)
        return int(data.ctypes.data), self._array(affine)

    def _layer(self, prefix: str, *, ratio: int, window: int, kind_index: int) -> list[int]:
        """The words of one layer."""
        config, weights = self.config, self._weights
        words = [0] * int(Layer.WORDS)
        attn, ffn = f"{prefix}.attn", f"{prefix}.ffn"
        words[Layer.RATIO] = ratio
        words[Layer.KIND_INDEX] = kind_index
        words[Layer.WINDOW_INDEX] = window
        words[Layer.ATTN_FN], words[Layer.ATTN_AFFINE] = self._mixer(f"{prefix}.hc_attn")
        words[Layer.FFN_FN], words[Layer.FFN_AFFINE] = self._mixer(f"{prefix}.hc_ffn")
        words[Layer.ATTN_NORM] = self._vector(f"{prefix}.attn_norm.weight")
        words[Layer.FFN_NORM] = self._vector(f"{prefix}.ffn_norm.weight")
        words[Layer.Q_NORM] = self._vector(f"{attn}.q_norm.weight")
        words[Layer.KV_NORM] = self._vector(f"{attn}.kv_norm.weight")
        words[Layer.SINK] = self._vector(f"{attn}.attn_sink")
        inputs = [f"{attn}.wkv", f"{attn}.wq_a"]
        if ratio:
            inputs += [f"{attn}.compressor.wkv", f"{attn}.compressor.wgate"]
            words[Layer.APE] = self._vector(f"{attn}.compressor.ape")
            words[Layer.POOL_NORM] = self._vector(f"{attn}.compressor.norm.weight")
        if ratio == 4:
            index = f"{attn}.indexer"
            inputs += [f"{index}.compressor.wkv", f"{index}.compressor.wgate"]
            inputs.append(f"{index}.weights_proj")
            words[Layer.INDEX_APE] = self._vector(f"{index}.compressor.ape")
            words[Layer.INDEX_NORM] = self._vector(f"{index}.compressor.norm.weight")
            words[Layer.INDEX_B], words[Layer.INDEX_B_FORM] = self._keep(
                pack_matrix(self._arena, weights[f"{index}.wq_b.weight"])
            )
        packed = pack_matrix(self._arena, *(weights[f"{name}.weight"] for name in inputs))
        words[Layer.IN], words[Layer.IN_FORM] = self._keep(packed)
        words[Layer.IN_PANELS] = packed.panels
        self._stride = max(self._stride, 64 * packed.panels)
        words[Layer.Q_B], words[Layer.Q_B_FORM] = self._keep(
            pack_matrix(self._arena, weights[f"{attn}.wq_b.weight"])
        )
        words[Layer.O_A], words[Layer.O_A_FORM] = self._keep(
            pack_grouped(self._arena, weights[f"{attn}.wo_a.weight"], config.o_groups)
        )
        words[Layer.O_B], words[Layer.O_B_FORM] = self._keep(
            pack_matrix(self._arena, weights[f"{attn}.wo_b.weight"])
        )

        gate = weights[f"{ffn}.gate.weight"].detach().float().numpy()
        experts = _round_up(config.n_routed_experts, 32)
        places = [e if e < config.n_routed_experts else -1 for e in range(experts)]
        panels = [
            pack_quarters(gate, places[first : first + 32], config.hidden_size)
            for first in range(0, experts, 32)
        ]
        joined = aligned_bytes(sum(p.size for p in panels))
        joined[:] = np.concatenate(panels)
        self._kept.append(joined)
        words[Layer.GATE] = int(joined.ctypes.data)
        if f"{ffn}.gate.tid2eid" in weights:
            table = np.ascontiguousarray(weights[f"{ffn}.gate.tid2eid"].numpy(), np.int64)
            self._kept.append(table)
            words[Layer.TABLE] = int(table.ctypes.data)
        else:
            words[Layer.BIAS] = self._vector(f"{ffn}.gate.bias", unit=32)
        words[Layer.UP], words[Layer.UP_FORM] = self._keep(
            pack_pairs(
                self._arena, weights[f"{ffn}.experts.w1"], weights[f"{ffn}.experts.w3"], narrow=True
            )
        )
        words[Layer.DOWN], words[Layer.DOWN_FORM] = self._keep(
            pack_experts(self._arena, weights[f"{ffn}.experts.w2"])
        )
        shared = f"{ffn}.shared_experts"
        self._job[Job.SHARED_INNER] = weights[f"{shared}.w1.weight"].shape[0]
        words[Layer.SHARED_UP], words[Layer.SHARED_UP_FORM] = self._keep(
            pack_pairs(
                self._arena,
                weights[f"{shared}.w1.weight"],
                weights[f"{shared}.w3.weight"],
                narrow=False,
            )
        )
        words[Layer.SHARED_DOWN], words[Layer.SHARED_DOWN_FORM] = self._keep(
            pack_matrix(self._arena, weights[f"{shared}.w2.weight"])
        )
        return words

    def _finish(self, layers: list[list[int]]) -> None:
        """Post the layers and drop the unpacked weights."""
        table = np.array(layers, np.int64)
        self._kept.append(table)
        self._job[Job.LAYERS] = len(layers)
        self._job[Job.LAYER_TABLE] = table.ctypes.data
        self._job[Job.IN_STRIDE] = self._stride
        self._weights = {}

    # ------------------------------------------------------------------------------ scratch

    def _point_at_angles(self) -> None:
        self._job[Job.ROPE_PLAIN] = self._plain.table.ctypes.data
        if self._long is not None:
            self._job[Job.ROPE_LONG] = self._long.table.ctypes.data

    def _cover(self, positions: int) -> None:
        """Make every position below `positions` have its angles."""
        if positions <= self._plain.positions:
            return
        moved = self._plain.cover(positions)
        if self._long is not None:
            moved = self._long.cover(positions) or moved
        if moved:
            self._point_at_angles()
            self._chain_jobs = []

    def _room(self, rows: int, cap: int, picked: int) -> None:
        """Make scratch for `rows` rows at positions below `cap`, `picked` of them choosing rows."""
        if rows <= self._rows and cap <= self._cap and picked <= self._picked:
            return
        if rows > self._rows:
            rows = max(rows, min(2 * self._rows, 256), 16)
        self._rows = max(self._rows, rows)
        self._cap = _round_up(max(self._cap, cap, 1024), 1024)
        self._picked = max(picked, self._rows if self._picked else 0)
        self._lay_out(self._rows, self._cap, self._picked)

    def _lay_out(self, rows: int, cap: int, picked: int) -> None:
        c, job = self.config, self._job
        hidden, heads = c.hidden_size, c.num_attention_heads * c.head_dim
        segments = hidden // 64
        pairs = rows * c.num_experts_per_tok
        shared = {
            Job.STREAMS: 4 * rows * 4 * hidden,
            Job.NORMED: 4 * rows * hidden,
            Job.PROJECTED: 4 * rows * self._stride,
            Job.QUERIES: 4 * rows * heads,
            Job.INDEX_QUERIES: 4 * rows * c.index_n_heads * c.index_head_dim,
            Job.ATTENDED: 4 * rows * heads,
            Job.LOW: 4 * rows * c.o_groups * c.o_lora_rank,
            Job.OUT: 4 * rows * hidden,
            Job.MIXES: 4 * rows * segments * 32,
            Job.SQUARES: 4 * rows * segments,
            Job.COEFS: 4 * rows * 32,
            Job.INNERS: 4 * pairs * c.moe_intermediate_size,
            Job.SHARED_INNERS: 4 * rows * int(job[Job.SHARED_INNER]),
            Job.CHOSEN: 8 * pairs,
            Job.SHARES: 4 * pairs,
            Job.SELECTED: 8 * picked * c.index_topk,
            Job.HEAD_IN: 4 * rows * 4 * hidden,
            Job.IOTA: 8 * 4 * rows,
            Job.FIXED: 4 * rows * hidden,
        }
        keys = _round_up(c.sliding_window + max(min(c.index_topk, cap // 4), cap // 128), 16) + 16
        experts = _round_up(c.n_routed_experts, 32)
        private = {
            Job.P_TILE: _TILE_BYTES,
            Job.P_SEGMENT: 4 * 256 * 2,
            Job.P_LOGITS: 4 * 4 * keys,
            Job.P_KEYS: 8 * keys,
            Job.P_COUNTS: 8 * (2 * c.n_routed_experts + 2),
            Job.P_ORDER: 8 * pairs,
            Job.P_WEIGHTS: 4 * pairs,
            Job.P_SCORES: 4 * max(2 * experts, cap // 4 + 16),
            Job.P_HISTOGRAM: 8 * 256,
        }
        total = sum(_round_up(size, 64) for size in shared.values())
        own = _round_up(sum(_round_up(size, 64) for size in private.values()), 4096)
        self._scratch = aligned_bytes(total + own * self._team.num_threads)
        base = int(self._scratch.ctypes.data)
        at = 0
        places = {}
        for word, size in shared.items():
            places[word] = at
            job[word] = base + at
            at += _round_up(size, 64)
        job[Job.PRIVATE] = base + at
        job[Job.PRIVATE_BYTES] = own
        job[Job.P_LOGITS_STRIDE] = keys
        at = 0
        for word, size in private.items():
            job[word] = at
            at += _round_up(size, 64)
        start = places[Job.IOTA]
        self._scratch[start : start + 8 * 4 * rows].view(np.int64)[:] = np.arange(4 * rows)
        self._grown(rows)

    def _grown(self, rows: int) -> None:
        """Called when scratch was made anew, for outputs that go with it."""

    def _check(self, tensor: torch.Tensor, what: str) -> int:
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ConfigError(
                f"{what} is {tensor.dtype}; the fused CPU path takes contiguous torch.float32"
            )
        return tensor.data_ptr()


def _address(tensor: torch.Tensor) -> int:
    assert tensor.dtype == torch.int64
    assert tensor.is_contiguous()
    return tensor.data_ptr()


class FusedDense(DenseWeight):
    """A dense table on compiled loops; `matmul` gives new memory each time.

    Args:
        table: [rows, columns] bf16 or fp32, columns a multiple of 16; kept for `gather`.
        num_threads: as `FusedModel`.
    """

    def __init__(self, table: torch.Tensor, *, num_threads: int | None = None) -> None:
        super().__init__(table.contiguous(), dtype=torch.float32)
        self._team = shared_team(num_threads)
        self._packed: Packed | None = None
        self._job = np.zeros(JOB_WORDS, np.int64)
        self._rows = 0
        self._measuring = np.zeros(JOB_WORDS, np.int64)
        self._widest = 0

    @property
    def packed(self) -> Packed:
        """The table's panels; made when first asked for, since an embedding never is."""
        if self._packed is None:
            self._packed = pack_matrix(Arena(), self.table)
        return self._packed

    def _make_room(self, rows: int) -> None:
        self._rows = max(rows, 64)
        self._scratch = aligned_bytes(4096 * self._team.num_threads)
        self._iota = np.arange(self._rows)
        packed, job = self.packed, self._job
        job[Job.KIND] = Kind.MATMUL
        job[Job.PRIVATE] = self._scratch.ctypes.data
        job[Job.PRIVATE_BYTES] = 4096
        job[Job.P_TILE] = 0
        job[Job.IOTA] = self._iota.ctypes.data
        job[Job.M_WEIGHT] = packed.address
        job[Job.M_FORM] = packed.form
        job[Job.M_INPUTS] = self.table.shape[1]

    def take_rows(self, ids: Sequence[int]) -> FusedDense:
        """Return a table like this one of the rows `ids`, copied."""
        return FusedDense(self.table[torch.tensor(ids)], num_threads=self._team.num_threads)

    def matmul(self, x: torch.Tensor, *, num_rows: int = 0) -> torch.Tensor:
        """`x` [R, columns] times the table's first `num_rows` rows (0: all), fp32 [R, num_rows]."""
        rows = x.shape[0]
        outputs = num_rows or self.num_rows
        panels = -(-outputs // 64)
        out = torch.empty((rows, 64 * panels))
        if rows:
            if rows > self._rows:
                self._make_room(rows)
            x = x.float().contiguous()
            job = self._job
            job[Job.ROWS] = rows
            job[Job.M_X] = x.data_ptr()
            job[Job.M_X_STRIDE] = x.shape[1]
            job[Job.M_PANELS] = panels
            job[Job.M_OUT] = out.data_ptr()
            job[Job.M_OUT_STRIDE] = 64 * panels
            self._team.run(job)
        return out[:, :outputs]

    def log_prob_of_best(self, logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        """Log-probability of each row's largest logit, fp32 [R]; -inf where one is not finite.

        The bits that `FusedMtpBlock.draft_greedy` gives for the same logits. `best` is not read.
        """
        assert logits.dtype == torch.float32
        assert logits.stride(1) == 1
        rows, width = logits.shape
        out = torch.empty(rows)
        if rows:
            job = self._measuring
            if width > self._widest:
                self._widest = width
                own = _round_up(_TILE_BYTES + 8 * -(-width // _CHUNK), 4096)
                self._chunks = aligned_bytes(own * self._team.num_threads)
                job[Job.KIND] = Kind.MEASURE
                job[Job.PRIVATE] = self._chunks.ctypes.data
                job[Job.PRIVATE_BYTES] = own
                job[Job.P_TILE] = 0
                job[Job.P_SCORES] = _TILE_BYTES
            job[Job.LIMIT] = width
            job[Job.ROWS] = rows
            job[Job.M_X] = logits.data_ptr()
            job[Job.M_X_STRIDE] = logits.stride(0)
            job[Job.LOG_PROB_OUT] = out.data_ptr()
            self._team.run(job)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class _Told:
    """The job's words of one step's inputs, which are kept so that no others get their address."""

    inputs: StepInputs
    words: tuple[int, ...]
    output: TargetOutput


class FusedModel(_Fused):
    """The target; equal to the plain torch model up to rounding.

    A row's bits depend neither on the other rows of a step nor on `num_threads`.

    Args:
        weights: DeepSeek names to CPU tensors, experts stacked; not kept.
        config: shapes; see `unsupported`.
        embed_tokens, lm_head: shared with the draft head.
        num_threads: threads that share a step, the caller's included; None: two where there are
            two cores.

    Raises:
        ConfigError: shapes or a number of threads that this path does not serve.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        config: ModelConfig,
        *,
        embed_tokens: FusedDense,
        lm_head: FusedDense,
        num_threads: int | None = None,
    ) -> None:
        super().__init__(weights, config, kind=Kind.TARGET, team=shared_team(num_threads))
        self.embed_tokens = embed_tokens
        self.lm_head = lm_head
        job = self._job
        table = embed_tokens.table
        assert table.dtype in (torch.bfloat16, torch.float32), table.dtype
        job[Job.EMBED] = table.data_ptr()
        job[Job.EMBED_FORM] = BF16 if table.dtype == torch.bfloat16 else FP32
        job[Job.HEAD] = lm_head.packed.address
        job[Job.HEAD_FORM] = lm_head.packed.form
        job[Job.FINAL_FN], job[Job.FINAL_AFFINE] = self._mixer("hc_head")
        job[Job.FINAL_NORM] = self._vector("norm.weight")
        counts = {0: 0, 4: 0, 128: 0}
        layers = []
        for n, ratio in enumerate(config.compress_ratios):
            layers.append(
                self._layer(f"layers.{n}", ratio=ratio, window=n, kind_index=counts[ratio])
            )
            counts[ratio] += 1
        self._finish(layers)
        self._pools: CachePools | None = None
        self._logits = torch.zeros((0, config.vocab_size))
        self._picks = np.zeros(0, np.int64)
        self._hiddens = torch.zeros(0)
        # What was told of inputs, which are the same objects for every step of a shape.
        self._told: dict[int, _Told] = {}
        self._telling: _Told | None = None

    def _grown(self, rows: int) -> None:
        self._told.clear()
        self._hiddens = torch.zeros((rows, 4, self.config.hidden_size))
        self._job[Job.HIDDENS_OUT] = self._hiddens.data_ptr()

    def _use(self, pools: CachePools) -> None:
        job = self._job
        job[Job.WINDOW_ROWS] = self._check(pools.window, "the window pool")
        job[Job.RING_SLOTS] = pools.window.shape[1]
        job[Job.RING] = pools.window.shape[2]
        job[Job.RAW4_KV] = self._check(pools.raw4_kv, "a pool")
        job[Job.RAW4_SCORE] = self._check(pools.raw4_score, "a pool")
        job[Job.INDEX_RAW_KV] = self._check(pools.index_raw_kv, "a pool")
        job[Job.INDEX_RAW_SCORE] = self._check(pools.index_raw_score, "a pool")
        job[Job.RING4] = pools.raw4_kv.shape[2]
        job[Job.RAW128_KV] = self._check(pools.raw128_kv, "a pool")
        job[Job.RAW128_SCORE] = self._check(pools.raw128_score, "a pool")
        job[Job.RING128] = pools.raw128_kv.shape[2]
        job[Job.ROWS4] = self._check(pools.rows4, "the pool of compressed rows")
        job[Job.INDEX4] = self._check(pools.index4, "a pool")
        job[Job.POOL4] = pools.rows4.shape[1]
        job[Job.ROWS128] = self._check(pools.rows128, "the pool of compressed rows")
        job[Job.POOL128] = pools.rows128.shape[1]
        job[Job.TABLES] = _address(pools.block_tables)
        job[Job.TABLE_STRIDE] = pools.block_tables.shape[1]
        self._pools = pools

    def forward(self, inputs: StepInputs, pools: CachePools) -> TargetOutput:
        """Run the rows of a step; writes `pools`.

        Raises:
            ConfigError: the pools are not fp32.
        """
        if pools is not self._pools:
            self._use(pools)
        told = self._told.get(id(inputs))
        if told is None:
            told = self._tell(inputs)
        elif told is not self._telling:
            self._job[Job.ROWS : Job.CAP + 1] = told.words
            self._telling = told
        if told.words[0]:
            self._team.run(self._job)
        return told.output

    def _tell(self, inputs: StepInputs) -> _Told:
        """Put a step's addresses into the job, after making room for it."""
        i = inputs
        rows, wanted, copied = i.ids.shape[0], i.logits_rows.shape[0], i.hidden_rows.shape[0]
        indexed = i.context_cap // 4 > self.config.index_topk
        self._room(max(rows, wanted, copied), i.context_cap, rows if indexed else 0)
        self._cover(i.context_cap)
        job = self._job
        width = _round_up(self.config.vocab_size, 64)
        if wanted > self._logits.shape[0]:
            self._logits = torch.zeros((max(wanted, 16), width))
            job[Job.LOGITS_OUT] = self._logits.data_ptr()
            self._leaders = np.zeros((len(self._logits), width // 64, 2), np.float32)
            job[Job.LEADERS] = self._leaders.ctypes.data
            self._picks = np.zeros(len(self._logits), np.int64)
            job[Job.BEST_IDS] = self._picks.ctypes.data
            self._told.clear()
        words = (
            rows,
            _address(i.ids),
            _address(i.positions),
            _address(i.slots),
            i.close4_dest.shape[0],
            _address(i.close4_slots),
            _address(i.close4_windows),
            _address(i.close4_dest),
            i.close128_dest.shape[0],
            _address(i.close128_slots),
            _address(i.close128_windows),
            _address(i.close128_dest),
            wanted,
            _address(i.logits_rows),
            copied,
            _address(i.hidden_rows),
            i.context_cap,
        )
        output = TargetOutput(
            logits=self._logits[:wanted, : self.config.vocab_size],
            hiddens=self._hiddens[:copied],
            picks=self._picks[:wanted],
        )
        if len(self._told) >= _MOST_TOLD:
            self._told.clear()
        told = self._told[id(inputs)] = self._telling = _Told(inputs, words, output)
        job[Job.ROWS : Job.CAP + 1] = words
        return told


class FusedMtpBlock(_Fused):
    """The draft block `mtp.0.*`; equal to the plain torch module up to rounding.

    Args and errors as `FusedModel`.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        config: ModelConfig,
        *,
        num_threads: int | None = None,
    ) -> None:
        super().__init__(weights, config, kind=Kind.MTP, team=shared_team(num_threads))
        job = self._job
        job[Job.E_PROJ], job[Job.E_FORM] = self._keep(
            pack_matrix(self._arena, weights["mtp.0.e_proj.weight"])
        )
        job[Job.H_PROJ], job[Job.H_FORM] = self._keep(
            pack_matrix(self._arena, weights["mtp.0.h_proj.weight"])
        )
        job[Job.E_NORM] = self._vector("mtp.0.enorm.weight")
        job[Job.H_NORM] = self._vector("mtp.0.hnorm.weight")
        job[Job.FINAL_FN], job[Job.FINAL_AFFINE] = self._mixer("mtp.0.hc_head")
        job[Job.FINAL_NORM] = self._vector("mtp.0.norm.weight")
        self._finish([self._layer("mtp.0", ratio=0, window=0, kind_index=0)])
        self._ring: DrafterRing | None = None
        self._chain_head: FusedDense | None = None
        self._chain_ids: torch.Tensor | None = None
        self._chain_limit = 0

    def _grown(self, rows: int) -> None:
        self._streams = torch.zeros((rows, 4, self.config.hidden_size))
        self._normed = torch.zeros((rows, self.config.hidden_size))
        self._job[Job.HIDDENS_OUT] = self._streams.data_ptr()
        self._job[Job.NORMED_OUT] = self._normed.data_ptr()
        self._chain_jobs = []

    def _use(self, ring: DrafterRing) -> None:
        job = self._job
        job[Job.WINDOW_ROWS] = self._check(ring.rows, "the draft ring")
        job[Job.RING_SLOTS] = ring.rows.shape[0]
        job[Job.RING] = ring.rows.shape[1]
        self._ring = ring
        self._chain_jobs = []

    def _post(self, inputs: MtpInputs, ring: DrafterRing, kind: Kind) -> int:
        rows = inputs.keys.shape[0]
        if not rows:
            return 0
        embeds = inputs.embeds.float().contiguous()
        hiddens = inputs.hiddens.float().contiguous()
        self._ready(inputs.keys, ring)
        job = self._job
        job[Job.KIND] = kind
        job[Job.ROWS] = rows
        job[Job.POSITIONS] = _address(inputs.keys)
        job[Job.SLOTS] = _address(inputs.slots)
        job[Job.FIRST] = _address(inputs.first_keys)
        job[Job.IDS_IN] = 0
        job[Job.EMBEDS_IN] = embeds.data_ptr()
        job[Job.HIDDENS_IN] = hiddens.data_ptr()
        job[Job.LOGITS] = job[Job.HIDDENS] = rows
        job[Job.LOGITS_ROWS] = job[Job.HIDDEN_ROWS] = job[Job.IOTA]
        self._team.run(job)
        return rows

    def _ready(self, keys: torch.Tensor, ring: DrafterRing, beyond: int = 0) -> None:
        """Scratch and angles for rows of these keys and `beyond` more positions."""
        self._room(keys.shape[0], 0, 0)
        if self._plain.positions < self.config.max_position_embeddings or beyond:
            self._cover(int(keys.max()) + 1 + beyond)
        if ring is not self._ring:
            self._use(ring)

    def can_chain(self, embed_tokens: DenseWeight, lm_head: DenseWeight) -> bool:
        """Whether `draft_greedy` takes these tables: those of this package."""
        return isinstance(embed_tokens, FusedDense) and isinstance(lm_head, FusedDense)

    def draft_greedy(
        self,
        *,
        ids: torch.Tensor,
        hiddens: torch.Tensor,
        keys: torch.Tensor,
        slots: torch.Tensor,
        first_keys: torch.Tensor,
        ring: DrafterRing,
        embed_tokens: DenseWeight,
        lm_head: DenseWeight,
        num_rows: int,
        count: int,
        min_log_prob: float = -math.inf,
        column_ids: torch.Tensor | None = None,
    ) -> list[tuple[int, float]]:
        """Draft a chain of one sequence in one call; see `ChainingMtpBlock.draft_greedy`.

        Raises:
            ConfigError: ring or streams are not fp32.
        """
        assert isinstance(lm_head, FusedDense)
        rows = keys.shape[0]
        self._ready(keys, ring, count)
        job = self._job
        job[Job.EMBED] = embed_tokens.table.data_ptr()
        job[Job.EMBED_FORM] = BF16 if embed_tokens.table.dtype == torch.bfloat16 else FP32
        limit = num_rows or lm_head.num_rows
        if (
            len(self._chain_jobs) < count
            or self._chain_limit != limit
            or self._chain_head is not lm_head
            or self._chain_ids is not column_ids
        ):
            self._make_chain(max(count, 8), lm_head, limit, column_ids)
        if rows > 1:
            job[Job.KIND] = Kind.MTP_ROWS
            job[Job.ROWS] = rows - 1
            job[Job.IDS_IN] = _address(ids)
            job[Job.HIDDENS_IN] = self._check(hiddens, "the streams")
            job[Job.POSITIONS] = _address(keys)
            job[Job.SLOTS] = _address(slots)
            job[Job.FIRST] = _address(first_keys)
            self._team.run(job)
        last = 8 * (rows - 1)
        first = self._chain_jobs[0]
        first[Job.IDS_IN] = _address(ids) + last
        first[Job.HIDDENS_IN] = self._check(hiddens[rows - 1], "the streams")
        key, lowest, length = int(keys[rows - 1]), int(first_keys[rows - 1]), ring.rows.shape[1]
        words = self._chain_words
        words[0, :count] = key + self._chain_steps[:count]
        words[1, :count] = slots[rows - 1]
        words[2, :count] = np.maximum(lowest, words[0, :count] - (length - 1))
        words[3, :count] = _NOT_RUN
        self._floats[6] = min_log_prob
        for n in range(count):
            self._chain_jobs[n][Job.NEXT] = (
                self._chain_jobs[n + 1].ctypes.data if n + 1 < count else 0
            )
        self._team.run(first)
        tokens: list[int] = words[3, :count].tolist()
        drawn = count if _NOT_RUN not in tokens else tokens.index(_NOT_RUN)
        return list(zip(tokens[:drawn], self._chain_log_probs[:drawn].tolist(), strict=True))

    def _make_chain(
        self, count: int, lm_head: FusedDense, limit: int, column_ids: torch.Tensor | None
    ) -> None:
        """A job for each step of a chain; what a step leaves for later ones is its own."""
        self._chain_limit, self._chain_head, self._chain_ids = limit, lm_head, column_ids
        self._chain_steps = np.arange(count)
        self._chain_words = np.zeros((4, count), np.int64)
        self._chain_log_probs = np.zeros(count, np.float32)
        chunks = -(-limit // _CHUNK)
        self._chain_chunks = np.zeros((count, chunks, 2), np.float32)
        self._chain_logits = np.zeros((count, 64 * -(-limit // 64)), np.float32)
        base, job = int(self._chain_words.ctypes.data), self._job
        self._chain_jobs = []
        for n in range(count):
            own = job.copy()
            own[Job.KIND] = Kind.MTP_CHAIN
            own[Job.ROWS] = own[Job.LOGITS] = 1
            own[Job.HIDDENS] = 0
            own[Job.LOGITS_ROWS] = own[Job.HIDDEN_ROWS] = own[Job.IOTA]
            own[Job.POSITIONS] = base + 8 * n
            own[Job.SLOTS] = base + 8 * (count + n)
            own[Job.FIRST] = base + 8 * (2 * count + n)
            own[Job.TOKEN_OUT] = base + 8 * (3 * count + n)
            if n:
                own[Job.IDS_IN] = base + 8 * (3 * count + n - 1)
                own[Job.HIDDENS_IN] = job[Job.STREAMS]
            own[Job.LOG_PROB_OUT] = self._chain_log_probs[n:].ctypes.data
            own[Job.CHUNKS] = self._chain_chunks[n].ctypes.data
            own[Job.LOGITS_OUT] = self._chain_logits[n].ctypes.data
            own[Job.LIMIT] = limit
            own[Job.COLUMN_IDS] = 0 if column_ids is None else _address(column_ids)
            own[Job.HEAD] = lm_head.packed.address
            own[Job.HEAD_FORM] = lm_head.packed.form
            self._chain_jobs.append(own)

    def forward(self, inputs: MtpInputs, ring: DrafterRing) -> MtpOutput:
        """Write keys, attend, return every row's output.

        Raises:
            ConfigError: the ring is not fp32.
        """
        rows = self._post(inputs, ring, Kind.MTP)
        return MtpOutput(normed=self._normed[:rows], streams=self._streams[:rows])

    def write_rows(self, inputs: MtpInputs, ring: DrafterRing) -> None:
        """Write keys only, bit for bit what `forward` writes.

        Raises:
            ConfigError: the ring is not fp32.
        """
        self._post(inputs, ring, Kind.MTP_ROWS)
