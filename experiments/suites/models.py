"""The models that the suites measure: their names, configurations, parameters and batches."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from experiments.suites.timing import Rounds
from xmod_jax.config import BYTE_VOCABULARY, Backbone, Compute, ModelConfig, MoE, Routing
from xmod_jax.errors import UserError
from xmod_jax.hierarchy import Hierarchy

QWEN3_TORCH = "qwen3_torch"  # Hugging Face's dense model in PyTorch
MASKED = "_masked"  # ends the name of a model that decodes with every sparse layer run and masked
KEPT = "_kept"  # ends the name of a model that trains with `Execution.keep_products`


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the flags say of a measurement.

    Attributes:
      models: names of the contenders, the rival first.
      depths: active depth of each.
      context: L, tokens.
      batch: sequences.
      width: D; heads of 64, d_ff = 3 D.
      compute: precision of activations and products.
      rounds: how long to measure.
      experts: numbers of experts, for the suite moe.
      whole_step: whether training includes the optimiser.
    """

    models: tuple[str, ...]
    depths: tuple[int, ...]
    context: int
    batch: int
    width: int
    compute: Compute
    rounds: Rounds
    experts: tuple[int, ...]
    whole_step: bool

    @property
    def tokens(self) -> int:
        """Of a batch."""
        return self.batch * self.context

    def labels(self) -> list[str]:
        """A name of every contender, with its depth where they differ."""
        if len(set(self.depths)) == 1:
            return list(self.models)
        return [f"{m}@{depth}" for m, depth in zip(self.models, self.depths, strict=True)]


@dataclasses.dataclass(frozen=True)
class Contender:
    """A model under measurement.

    Attributes:
      name: of its row.
      config: its configuration.
      model: parameters, or their shapes.
      tokens: int32 [B, L + 1], or their shape.
      keep: whether products are kept for the backward pass.
    """

    name: str
    config: ModelConfig
    model: Any
    tokens: Any
    keep: bool


def backbone(width: int) -> Backbone:
    """A layer of width D: heads of 64, half as many of keys and values, d_ff = 3 D.

    Raises:
      UserError: D is not a multiple of two heads.
    """
    if width % 128:
        raise UserError(f"--width={width} is not a multiple of 128 (two heads of 64 a KV head)")
    return Backbone(width, 64, width // 64, width // 128, 3 * width, BYTE_VOCABULARY)


def config(name: str, depth: int, layer: Backbone, compute: Compute) -> ModelConfig:
    """The model that a name stands for: a hierarchy, ``mod`` or ``moe_8_64``.

    Raises:
      UserError: no such name, or no such depth of it.
    """
    plain = name.lower().removesuffix(MASKED).removesuffix(KEPT)
    routing = Routing.mod() if plain == "mod" else Routing()
    hierarchy = "dense" if plain == QWEN3_TORCH else name[: len(plain)]
    try:
        if experts := re.fullmatch(r"moe_8_(\d+)", plain):
            sparsity, rest = divmod(int(experts[1]), 8)
            if rest:
                raise ValueError(f"{name}: the experts must be a multiple of 8")
            moe = MoE.fine_grained(layer, sparsity)
            return ModelConfig(layer, Hierarchy.dense(depth), compute=compute, moe=moe)
        return ModelConfig(layer, Hierarchy.from_name(hierarchy, depth), routing, compute)
    except ValueError as error:
        raise UserError(f"--models: {error}") from error


def contenders(setting: Setting, arrays: bool) -> list[Contender]:
    """The models of this package among the contenders; shapes only unless `arrays`."""
    import jax

    layer = backbone(setting.width)
    shape = (setting.batch, setting.context + 1)
    found = []
    for name, label, depth in zip(setting.models, setting.labels(), setting.depths, strict=True):
        if name == QWEN3_TORCH:
            continue
        model_config = config(name, depth, layer, setting.compute)
        model = random_model(model_config) if arrays else shapes(model_config)
        tokens: Any = jax.ShapeDtypeStruct(shape, "int32")
        if arrays:
            tokens = jax.device_put(random_tokens(model_config, *shape))
        found.append(Contender(label, model_config, model, tokens, name.endswith(KEPT)))
    return found


def shapes(model: ModelConfig) -> Any:
    """A `Decoder` of shapes."""
    import jax
    from flax import nnx

    from xmod_jax.model import Decoder

    return jax.eval_shape(lambda key: Decoder(model, rngs=nnx.Rngs(key)), jax.random.key(0))


def random_tokens(model: ModelConfig, *shape: int) -> Any:
    """int32 token ids of a shape, in NumPy; the same at every call."""
    import numpy as np

    return np.random.default_rng(0).integers(0, model.backbone.vocab_size, shape, np.int32)


def random_model(model: ModelConfig) -> Any:
    """A `Decoder` with parameters as a fresh one has, drawn by NumPy.

    JAX's generator takes longer to compile for a deep model than anything that is measured.
    """
    import jax
    import numpy as np

    rng = np.random.default_rng(0)

    def fill(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if "_norm.scale" in name:
            return jax.device_put(np.ones(leaf.shape, leaf.dtype))
        if ".sparse.gate" in name:
            return jax.device_put(np.full(leaf.shape, model.routing.gate_init, leaf.dtype))
        if ".ffn.bias" in name:
            return jax.device_put(np.zeros(leaf.shape, leaf.dtype))
        drawn = rng.standard_normal(leaf.shape, np.float32)
        drawn *= np.float32(0.02)
        return jax.device_put(drawn.astype(leaf.dtype, copy=False))

    return jax.tree_util.tree_map_with_path(fill, shapes(model))
