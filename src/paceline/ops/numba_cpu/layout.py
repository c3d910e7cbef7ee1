"""Names of the words through which Python tells the compiled code where everything lies.

A job is one int64 array. Words are numbers or addresses; the groups below are ranges of it.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = ["CONTROL_WORDS", "JOB_WORDS", "Control", "Job", "Kind", "Layer"]


class Kind(IntEnum):
    """What a job does."""

    TARGET = 0
    MTP = 1
    MTP_ROWS = 2
    MATMUL = 3
    MTP_CHAIN = 4
    MEASURE = 5


class Control(IntEnum):
    """Words shared by the threads of a team; each on a cache line of its own."""

    GATE = 0
    TICKET = 8
    DONE = 16
    STOP = 24
    JOB = 32
    THREADS = 40
    BASE = 41


CONTROL_WORDS = 48


class Job(IntEnum):
    """Words of a job."""

    KIND = 0
    # Shapes.
    LAYERS = 1
    HIDDEN = 2
    HEADS = 3
    HEAD_DIM = 4
    ROPE = 5
    Q_LORA = 6
    GROUPS = 7
    O_LORA = 8
    WINDOW = 9
    INDEX_HEADS = 10
    INDEX_DIM = 11
    INDEX_TOPK = 12
    EXPERTS = 13
    PICKS = 14
    INNER = 15
    SHARED_INNER = 16
    SINKHORN = 17
    VOCAB = 18
    FLOATS = 19
    # Weights outside the layers.
    EMBED = 20
    EMBED_FORM = 21
    HEAD = 22
    HEAD_FORM = 23
    FINAL_FN = 24
    FINAL_AFFINE = 25
    FINAL_NORM = 26
    ROPE_PLAIN = 27
    ROPE_LONG = 28
    LAYER_TABLE = 29
    E_PROJ = 30
    E_FORM = 31
    H_PROJ = 32
    H_FORM = 33
    E_NORM = 34
    H_NORM = 35
    IN_STRIDE = 36
    # Scratch, shared by the threads.
    STREAMS = 40
    NORMED = 41
    PROJECTED = 42
    QUERIES = 43
    INDEX_QUERIES = 44
    ATTENDED = 45
    LOW = 46
    OUT = 47
    MIXES = 48
    SQUARES = 49
    COEFS = 50
    INNERS = 51
    SHARED_INNERS = 52
    CHOSEN = 53
    SHARES = 54
    SELECTED = 55
    HEAD_IN = 56
    IOTA = 57
    FIXED = 58
    # Scratch of each thread: first address, bytes of each, offsets inside.
    PRIVATE = 60
    PRIVATE_BYTES = 61
    P_TILE = 62
    P_SEGMENT = 63
    P_LOGITS = 64
    P_LOGITS_STRIDE = 65
    P_KEYS = 66
    P_COUNTS = 67
    P_ORDER = 68
    P_WEIGHTS = 69
    P_SCORES = 70
    P_HISTOGRAM = 71
    # The step.
    ROWS = 80
    IDS = 81
    POSITIONS = 82
    SLOTS = 83
    CLOSE4 = 84
    CLOSE4_SLOTS = 85
    CLOSE4_WINDOWS = 86
    CLOSE4_DEST = 87
    CLOSE128 = 88
    CLOSE128_SLOTS = 89
    CLOSE128_WINDOWS = 90
    CLOSE128_DEST = 91
    LOGITS = 92
    LOGITS_ROWS = 93
    HIDDENS = 94
    HIDDEN_ROWS = 95
    CAP = 96
    FIRST = 97
    EMBEDS_IN = 98
    HIDDENS_IN = 99
    LOGITS_OUT = 100
    HIDDENS_OUT = 101
    NORMED_OUT = 102
    IDS_IN = 103
    # A chain of draft steps, each with a job of its own.
    NEXT = 104
    TOKEN_OUT = 105
    LOG_PROB_OUT = 106
    CHUNKS = 107
    LIMIT = 108
    COLUMN_IDS = 109
    # The caches.
    WINDOW_ROWS = 110
    RING_SLOTS = 111
    RING = 112
    RAW4_KV = 113
    RAW4_SCORE = 114
    INDEX_RAW_KV = 115
    INDEX_RAW_SCORE = 116
    RING4 = 117
    RAW128_KV = 118
    RAW128_SCORE = 119
    RING128 = 120
    ROWS4 = 121
    INDEX4 = 122
    POOL4 = 123
    ROWS128 = 124
    POOL128 = 125
    TABLES = 126
    TABLE_STRIDE = 127
    # A lone product.
    M_X = 130
    M_X_STRIDE = 131
    M_WEIGHT = 132
    M_FORM = 133
    M_INPUTS = 134
    M_PANELS = 135
    M_OUT = 136
    M_OUT_STRIDE = 137
    # The largest logits of the target's rows, of each panel and of all.
    LEADERS = 138
    BEST_IDS = 139


JOB_WORDS = 144


class Layer(IntEnum):
    """Words of one layer."""

    RATIO = 0
    KIND_INDEX = 1
    WINDOW_INDEX = 37
    WORDS = 40
    ATTN_FN = 2
    ATTN_AFFINE = 3
    ATTN_NORM = 4
    IN = 5
    IN_FORM = 6
    IN_PANELS = 7
    Q_NORM = 8
    KV_NORM = 9
    APE = 10
    INDEX_APE = 11
    POOL_NORM = 12
    INDEX_NORM = 13
    Q_B = 14
    Q_B_FORM = 15
    INDEX_B = 16
    INDEX_B_FORM = 17
    SINK = 18
    O_A = 19
    O_A_FORM = 20
    O_B = 21
    O_B_FORM = 22
    FFN_FN = 23
    FFN_AFFINE = 24
    FFN_NORM = 25
    GATE = 26
    BIAS = 27
    TABLE = 28
    UP = 29
    UP_FORM = 30
    DOWN = 31
    DOWN_FORM = 32
    SHARED_UP = 33
    SHARED_UP_FORM = 34
    SHARED_DOWN = 35
    SHARED_DOWN_FORM = 36
