"""Names of a model's tensors: ours, those of Hugging Face, and those that other tools make of them.

Shapes: D width, V vocabulary, F FFN width, X experts, N layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from xmod_jax.errors import UserError
from xmod_jax.exchange.tensors import TensorFolder

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Ours to theirs; {} stands for the layer, and for the expert.
_WHOLE = {"embedding": EMBEDDING, "head": HEAD, "final_norm.scale": "model.norm.weight"}
_LAYER = {
    "attention_norm.scale": "model.layers.{}.input_layernorm.weight",
    "attention.query": "model.layers.{}.self_attn.q_proj.weight",
    "attention.key": "model.layers.{}.self_attn.k_proj.weight",
    "attention.value": "model.layers.{}.self_attn.v_proj.weight",
    "attention.output": "model.layers.{}.self_attn.o_proj.weight",
    "attention.query_norm.scale": "model.layers.{}.self_attn.q_norm.weight",
    "attention.key_norm.scale": "model.layers.{}.self_attn.k_norm.weight",
    "ffn_norm.scale": "model.layers.{}.post_attention_layernorm.weight",
}
_FFN = {
    "ffn.gate": "model.layers.{}.mlp.gate_proj.weight",
    "ffn.up": "model.layers.{}.mlp.up_proj.weight",
    "ffn.down": "model.layers.{}.mlp.down_proj.weight",
}
_MOE = {
    "ffn.router": "model.layers.{}.mlp.gate.weight",
    "ffn.gate": "model.layers.{}.mlp.experts.{}.gate_proj.weight",
    "ffn.up": "model.layers.{}.mlp.experts.{}.up_proj.weight",
    "ffn.down": "model.layers.{}.mlp.experts.{}.down_proj.weight",
}
# Put before names, or between their parts, by what wraps a PyTorch module.
_WRAPPER = r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
_WRAPPERS = re.compile(rf"^(module\.|{_WRAPPER})+|(?<=\.){_WRAPPER}")
_BASE = re.compile(r"^(embed_tokens|layers|norm)\.")  # of a model that was saved without its head
_COMPUTED = re.compile(r"rotary_emb\.inv_freq")  # a buffer that follows from config.json
_FUSED = re.compile(r"^(.*\.mlp\.experts\.)(gate_up_proj|down_proj)$")
# Tensors that tell of another kind of model.
_FOREIGN = (
    (
        re.compile(r"\blora_|\bbase_layer\b|^base_model\."),
        "weights of an adapter: merge it into its base model first (merge_and_unload)",
    ),
    (
        re.compile(
            r"(_scale|_scale_inv|_scales|_blocks|_packed|_zero_point|absmax|quant_map|quant_state.*"
            r"|\.qweight|\.qzeros|\.scales|\.g_idx|\.SCB)$"
        ),
        "quantised weights: save the model dequantised",
    ),
    (re.compile(r"\.bias$"), "a bias, our layers have none"),
    (re.compile(r"shared_expert"), "a shared expert, Qwen3-MoE has none"),
)


class Theirs(NamedTuple):
    """Where one of our leaves stands in their files.

    Attributes:
      names: of their tensors: an array of [N], [N, X] or [].
      turned: whether theirs are [out, in] where ours are [in, out].
    """

    names: np.ndarray
    turned: bool

    def view(self, array: np.ndarray) -> np.ndarray:
        """One of our tensors as theirs, or back."""
        return array.T if self.turned else array


def theirs(path: Any, shape: tuple[int, ...], tied: bool) -> Theirs | None:
    """Their tensors of one of our leaves; None for a selection bias, which they do not have."""
    ours = ".".join(re.findall(r"\w+", jax.tree_util.keystr(path).removesuffix(".value")))
    layer = ours.removeprefix("prefix.")
    if layer == "ffn.bias":
        return None
    experts = layer == "ffn.router" or (layer in _FFN and len(shape) == 4)
    template = (_WHOLE | _LAYER | (_MOE if experts else _FFN))[layer]
    if tied and template == HEAD:
        template = EMBEDDING
    names = np.empty(shape[: template.count("{}")], object)
    for index in np.ndindex(names.shape):
        names[index] = template.format(*index)
    return Theirs(names, len(shape) > names.ndim + 1 and ours != "embedding")


def order(name: str) -> tuple[bool, list[tuple[bool, int, str]]]:
    """Sorts tensors as the model runs: embedding, layers by number, final norm, head."""
    parts = [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]
    return name == HEAD, parts


class _Part(NamedTuple):
    """A tensor, or a part of one.

    Attributes:
      name: in the file.
      shape: of the part.
      place: index of the part in the tensor; () for all of it.
    """

    name: str
    shape: tuple[int, ...]
    place: tuple[int | slice, ...] = ()


class Stored:
    """The tensors of a folder by the names that Qwen3 gives them, however they were saved.

    Wrappers' prefixes go, a base model's names get theirs, experts in one tensor are told apart,
    and a tied embedding may be stored as the head. Buffers that transformers computes are left out.

    Attributes:
      names: of all tensors.
    """

    def __init__(self, folder: TensorFolder, tied: bool) -> None:
        """Names what a folder holds; reads no tensor.

        Raises:
          UserError: tensors that tell of another kind of model, or of one name.
        """
        self._folder = folder
        self._parts: dict[str, _Part] = {}
        plain = {name: _WRAPPERS.sub("", name) for name in folder.names}
        base = not any(name.startswith("model.") for name in plain.values())
        for stored, name in sorted(plain.items()):
            self._refuse_foreign(stored)
            if _COMPUTED.search(name):
                continue
            if base and _BASE.match(name):
                name = f"model.{name}"
            for place, part in self._separated(name, stored):
                if place in self._parts:
                    raise UserError(
                        f"{folder.where(stored)} and {self._parts[place].name} are both {place}"
                    )
                self._parts[place] = part
        if tied and HEAD in self._parts:
            self._parts.setdefault(EMBEDDING, self._parts[HEAD])

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._parts)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor; None where it is missing."""
        part = self._parts.get(name)
        return None if part is None else part.shape

    def where(self, name: str) -> str:
        """File and name of a tensor as it is stored, for messages."""
        return self._folder.where(self._parts[name].name)

    def read(self, name: str) -> np.ndarray:
        """A tensor as float32.

        Raises:
          UserError: as `TensorFolder.read`.
        """
        part = self._parts[name]
        return self._folder.read(part.name, part.place)

    def _refuse_foreign(self, stored: str) -> None:
        for pattern, what in _FOREIGN:
            if pattern.search(stored):
                raise UserError(f"{self._folder.where(stored)} is {what}")

    def _separated(self, name: str, stored: str) -> Iterator[tuple[str, _Part]]:
        """A tensor, or the experts of one that holds them all: [X, 2F, D] or [X, D, F]."""
        shape = self._folder.shape(stored)
        found = _FUSED.match(name)
        if not found:
            yield name, _Part(stored, shape)
            return
        before, kind = found.group(1, 2)
        if len(shape) != 3 or 0 in shape or (kind == "gate_up_proj" and shape[1] % 2):
            raise UserError(f"{self._folder.where(stored)} has the shape {shape}, no experts'")
        X, F = shape[0], shape[1] // 2
        for x in range(X):
            if kind == "down_proj":
                yield f"{before}{x}.down_proj.weight", _Part(stored, shape[1:], (x,))
                continue
            for half, which in enumerate(("gate_proj", "up_proj")):
                rows = slice(half * F, (half + 1) * F)
                yield f"{before}{x}.{which}.weight", _Part(stored, (F, shape[2]), (x, rows))
