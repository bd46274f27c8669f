"""Tokens one by one behind a long context, with caches that are filled without running it.

The caches hold random rows: as many as a context of that length leaves there when every sparse
layer gets its L/K tokens. Routing is forced likewise: at every token each stage runs A of its A K
sparse layers, the next ones at the next token, so that all layers run equally often.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from experiments.suites import machine, models, qwen3_torch, timing
from experiments.suites.models import MASKED, QWEN3_TORCH, Contender, Setting
from experiments.suites.timing import Row
from xmod_jax import accounting
from xmod_jax.config import Compute, ModelConfig
from xmod_jax.nn.routing import capacity

CONTEXTS = (1024, 4096, 8192)
MODELS = ("dense", "A4K8", "A3K16", f"A4K8{MASKED}")
STEPS = 16  # tokens of a measurement
READ = "reading memory"
_ROUTED = 1e9  # a threshold that no logit reaches; its negative, one that all reach


@dataclasses.dataclass
class _Decoder:
    """A contender on the way: its step, its caches, and what a token moves.

    Attributes:
      call: decodes `STEPS` tokens.
      cache_bytes: of all buffers.
      moved_bytes: weights and cached rows that a token's arithmetic needs, mean over tokens.
      layers_run: sparse layers that run at a token.
    """

    call: Callable[[], Any]
    cache_bytes: float
    moved_bytes: float
    layers_run: float


def default_models() -> tuple[str, ...]:
    """The contenders where none are named; PyTorch's model only where it can run."""
    import jax

    if not qwen3_torch.installed():
        timing.say(f"{QWEN3_TORCH} is left out; to compare with it: {qwen3_torch.INSTALL}")
        return MODELS
    return (*MODELS, QWEN3_TORCH) if jax.default_backend() == "cpu" else MODELS


def decoding(setting: Setting) -> list[Row]:
    """Milliseconds a token, cache bytes, and the share of the measured read bandwidth."""
    ours = {each.name: each for each in models.contenders(setting, arrays=True)}
    decoders: dict[str, _Decoder] = {}
    for name, label, depth in zip(setting.models, setting.labels(), setting.depths, strict=True):
        timing.say(f"compiling {label}, context {setting.context}")
        if name == QWEN3_TORCH:
            decoders[label] = _torch(setting, depth)
        else:
            decoders[label] = _ours(ours[label], setting, name.endswith(MASKED))
    read, read_bytes = machine.reading()
    calls = {label: each.call for label, each in decoders.items()}
    times = timing.interleave(calls | {READ: read}, setting.rounds)
    bandwidth = read_bytes / times[READ].median
    first = decoders[setting.labels()[0]]
    rows = []
    for label, each in decoders.items():
        row = timing.row(label, times)
        per_token = row["seconds"] / STEPS
        rows.append(
            {
                "model": label,
                "context": setting.context,
                "ms/token": 1e3 * per_token,
                "fastest": 1e3 * row["fastest"] / STEPS,
                "slowest": 1e3 * row["slowest"] / STEPS,
                "cpu_ms": 1e3 * row["cpu_seconds"] / STEPS,
                "time_ratio": 1 / row["speed"],
                "sparse_layers": each.layers_run,
                "cache_MB": each.cache_bytes / 1e6,
                "cache_ratio": each.cache_bytes / first.cache_bytes,
                "moved_MB": each.moved_bytes / 1e6,
                "of_bandwidth": each.moved_bytes / per_token / bandwidth,
            }
        )
    timing.say(f"read bandwidth of this machine in this run: {bandwidth / 1e9:.1f} GB/s")
    return rows


def _ours(each: Contender, setting: Setting, masked: bool) -> _Decoder:
    import functools

    import jax.numpy as jnp

    from xmod_jax.inference.decode import cast_once, decode_step
    from xmod_jax.training.compilation import jit

    config = each.config
    model, cache = cast_once(each.model), filled_cache(config, setting)
    routes = _forced_routes(config)
    token_B = jnp.ones(setting.batch, jnp.int32)
    running_B = jnp.ones(setting.batch, bool)
    program = jit(functools.partial(decode_step, every_layer=masked), donate_argnums=2)
    step = program.lower(model, routes[0], cache, token_B, running_B).compile()
    state, turn = [cache, None], itertools.cycle(routes)

    def decode() -> Any:
        for _ in range(STEPS):
            logits_BV, state[0] = step(model, next(turn), state[0], token_B, running_B)
        # The same context for every measurement; what was written behind it is written over.
        state[0] = _rewound(state[0], setting, config)
        return logits_BV

    layers = config.hierarchy.sparse_layers
    run = layers if masked else layers / config.hierarchy.sparsity
    return _Decoder(decode, cache.nbytes, _moved(config, setting, run), run)


def filled_cache(config: ModelConfig, setting: Setting) -> Any:
    """A cache as `setting.context` evenly routed tokens leave it, with random rows."""
    import jax
    import numpy as np

    from xmod_jax.inference import cache as caches

    tokens = setting.context + STEPS
    # Routing is forced to be even, so this holds the steps too: no buffer has to grow.
    routed = caches.routed_rows(tokens, config.hierarchy.sparsity)
    make = lambda: caches.empty(config, setting.batch, tokens, routed)
    rng = np.random.default_rng(0)

    def fill(leaf: Any) -> Any:
        if leaf.dtype == np.int32:
            return jax.device_put(np.zeros(leaf.shape, np.int32))
        rows = rng.standard_normal(leaf.shape, np.float32)
        return jax.device_put(rows.astype(leaf.dtype, copy=False))

    return _rewound(jax.tree.map(fill, jax.eval_shape(make)), setting, config)


def _rewound(cache: Any, setting: Setting, config: ModelConfig) -> Any:
    """The cache with the lengths of the context, whatever its rows are."""
    import jax.numpy as jnp

    count = capacity(setting.context, config.hierarchy.sparsity)
    groups = tuple(
        group._replace(count_NSB=jnp.full_like(group.count_NSB, count)) for group in cache.groups
    )
    length_B = jnp.full_like(cache.length_B, setting.context)
    return cache._replace(length_B=length_B, groups=groups)


def _forced_routes(config: ModelConfig) -> list[Any]:
    """K routes: under the n-th, every K-th layer of a stage from the n-th on gets every token."""
    import jax.numpy as jnp

    from xmod_jax.model import Threshold

    K = config.hierarchy.sparsity

    def thresholds(group: Any, n: int) -> Any:
        due_S = jnp.arange(group.sparse_layers) % K == n
        value_S = jnp.where(due_S, -_ROUTED, _ROUTED).astype(jnp.float32)
        return jnp.broadcast_to(value_S, (group.count, group.sparse_layers))

    groups = config.hierarchy.groups
    return [Threshold(tuple(thresholds(group, n) for group in groups)) for n in range(K)]


def _moved(config: ModelConfig, setting: Setting, layers_run: float) -> float:
    """Bytes that a token's arithmetic needs: weights once, cached keys and values once a sequence.

    Embedding rows, router vectors, norms and what is written are left out: a thousandth.
    """
    layer, size = config.backbone, 4 if config.compute is Compute.FLOAT32 else 2
    K = config.hierarchy.sparsity
    row = 2 * layer.num_kv_heads * layer.head_dim
    weights = float(layer.vocab_size * layer.d_model)
    rows = 0.0
    for kind in accounting.layer_kinds(config):
        if kind.name == "sparse":
            weights += layers_run * kind.matrices
            rows += layers_run * capacity(setting.context, K)
        else:
            weights += float(kind.count * (kind.matrices * kind.matmul_share + kind.unpriced))
            rows += kind.count * setting.context
    return size * (weights + setting.batch * rows * row)


def _torch(setting: Setting, depth: int) -> _Decoder:
    from xmod_jax.hierarchy import Hierarchy

    call, cache_bytes = qwen3_torch.decoding(setting, depth, STEPS)
    dense = ModelConfig(models.backbone(setting.width), Hierarchy.dense(depth))
    return _Decoder(call, cache_bytes, _moved(dense, setting, 0), 0)
