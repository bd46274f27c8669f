"""How arrays lie on a mesh of devices: the axes, the table of parameters, the batch.

Three axes, any product of them:

* ``data``: sequences; parameters are repeated.
* ``fsdp``: sequences too; every matrix and what belongs to it in the optimiser lies in parts, and
  is gathered for one layer at a time.
* ``tensor``: attention heads and FFN columns of every layer.

`nn/collectives.py` holds what devices exchange inside a step.

Shapes: B sequences of a step, L context, D width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from xmod_jax.config import RunConfig
from xmod_jax.errors import UserError

DATA, FSDP, TENSOR = AXES = ("data", "fsdp", "tensor")
BATCH_AXES = (DATA, FSDP)
T = TypeVar("T")

# Axes of a matrix's last two dimensions by module and name: `fsdp` cuts the width D, `tensor` the
# heads or the FFN columns. What is not listed (norms, routers, gates, biases) is small and lies
# whole on every device. Stacks are cut like their matrices: their leading axes are scanned over.
_IN, _OUT = (FSDP, TENSOR), (TENSOR, FSDP)
_TABLE = {
    "embedding": (None, FSDP),
    "head": (FSDP, None),
    "attention.query": _IN,
    "attention.key": _IN,
    "attention.value": _IN,
    "attention.output": _OUT,
    "ffn.gate": _IN,
    "ffn.up": _IN,
    "ffn.down": _OUT,
    "shared.gate": _IN,
    "shared.up": _IN,
    "shared.down": _OUT,
}
# Read by every device of `tensor` for its own heads, so that their gradients are partial sums.
_OF_HEADS = re.compile(r"\.(query|key)_norm\.scale\b")


def axes_of(path: Any) -> tuple[str | None, str | None]:
    """The mesh axes of a leaf's last two dimensions, from its path in any tree of parameters."""
    names = re.findall(r"\w+", jax.tree_util.keystr(path).removesuffix(".value"))
    return _TABLE.get("".join(names[-1:])) or _TABLE.get(".".join(names[-2:])) or (None, None)


def of_heads(path: Any) -> bool:
    """Whether a leaf is whole on every device of `tensor` but serves each one's own heads."""
    return bool(_OF_HEADS.search(jax.tree_util.keystr(path)))


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Devices along each axis."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name, count in dataclasses.asdict(self).items():
            if count < 1:
                raise ValueError(f"mesh axis {name} needs at least one device, got {count}")

    @classmethod
    def parse(cls, text: str) -> MeshShape:
        """From ``"data:2,fsdp:4"``; axes that are not named have one device.

        Raises:
          UserError: not such a list, an unknown axis, or one given twice.
        """
        counts: dict[str, int] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*(\w+)\s*:\s*(\d{1,9})\s*", part)
            if match is None or match[1] not in AXES or match[1] in counts or int(match[2]) < 1:
                raise UserError(
                    f"--mesh={text} is not a list of axis:devices with the axes "
                    f"{', '.join(AXES)}, for instance data:2,fsdp:4"
                )
            counts[match[1]] = int(match[2])
        return cls(**counts)

    @classmethod
    def for_devices(cls, count: int, config: RunConfig) -> MeshShape:
        """As many of `count` devices on `data` as share a micro-batch evenly."""
        return cls(data=math.gcd(count, config.micro_batch))

    def __str__(self) -> str:
        return ",".join(f"{name}:{count}" for name, count in dataclasses.asdict(self).items())

    @property
    def size(self) -> int:
        """Devices of the mesh."""
        return self.data * self.fsdp * self.tensor

    @property
    def batch_parts(self) -> int:
        """Parts that a batch is cut into."""
        return self.data * self.fsdp

    def check(self, config: RunConfig) -> None:
        """Refuses a mesh that does not divide the run's sizes.

        Raises:
          UserError: names the size and the axis.
        """
        backbone, moe = config.model.backbone, config.model.moe
        ffn = ("FFN width", backbone.d_ff) if moe is None else ("expert width", moe.d_expert)
        sizes = (
            ("sequences of a micro-batch", config.micro_batch, self.batch_parts, "data x fsdp"),
            ("width", backbone.d_model, self.fsdp, FSDP),
            ("key/value heads", backbone.num_kv_heads, self.tensor, TENSOR),
            (*ffn, self.tensor, TENSOR),
        )
        for name, size, parts, axis in sizes:
            if size % parts:
                raise UserError(
                    f"mesh {self}: {config.name}'s {name}, {size}, cannot be cut into the {parts} "
                    f"parts of {axis}"
                )

    def make(self, axis_type: AxisType = AxisType.Auto) -> Mesh:
        """The mesh over the first devices; those of a process stand together in it.

        Raises:
          UserError: too few devices, or too many where several processes hold them.
        """
        devices = jax.devices()
        if self.size > len(devices) or (jax.process_count() > 1 and self.size < len(devices)):
            raise UserError(
                f"mesh {self} has {self.size} devices, there are {len(devices)}: choose a --mesh "
                "of as many"
            )
        grid = np.array(devices[: self.size]).reshape(self.data, self.fsdp, self.tensor)
        return Mesh(grid, AXES, axis_types=(axis_type,) * 3)


def check_axes(mesh: Mesh) -> None:
    """Refuses a mesh that `MeshShape.make` could not have made; its axes may be explicit or not.

    Raises:
      UserError: its axes have other names.
    """
    if mesh.axis_names != AXES:
        raise UserError(
            f"a mesh with the axes {', '.join(map(str, mesh.axis_names))}: training and evaluation "
            "run on data, fsdp and tensor (MeshShape.make)"
        )


def specs(tree: T) -> T:
    """A tree of `PartitionSpec` like `tree`: parameters, or anything that holds their like."""

    def spec(path: Any, leaf: Any) -> P:
        axes = axes_of(path)
        return P(*[None] * (leaf.ndim - 2), *axes) if any(axes) else P()

    return jax.tree_util.tree_map_with_path(spec, tree)


def placed(abstract: T, mesh: Mesh) -> T:
    """Shapes and dtypes of a state with the shardings that it has on `mesh`."""
    return jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
        ),
        abstract,
        specs(abstract),
    )


def batch_spec(rows: int, mesh: Mesh) -> P:
    """Where `rows` sequences lie: in parts, or whole everywhere where they cannot be cut evenly."""
    return P() if rows % (mesh.shape[DATA] * mesh.shape[FSDP]) else P(BATCH_AXES)


def rows_of_process(mesh: Mesh, rows: int) -> tuple[int, int]:
    """Which part of a batch's rows this process feeds, and of how many; for `train_iterator`.

    Processes that `tensor` alone separates feed the same rows.
    """
    sharding = NamedSharding(mesh, P(BATCH_AXES))
    indices = sharding.addressable_devices_indices_map((rows,)).values()
    slices = [index[0] for index in indices if index]
    start = min(part.start or 0 for part in slices)
    stop = max(rows if part.stop is None else part.stop for part in slices)
    if start % (stop - start) or rows % (stop - start):
        raise UserError(
            "the devices of a process must hold whole parts of a batch: its rows "
            f"{start} to {stop} are none of {rows}; let tensor divide the devices of a process"
        )
    return start // (stop - start), rows // (stop - start)


def global_batch(local_BL: np.ndarray, rows: int, mesh: Mesh) -> jax.Array:
    """The batch of all processes from this one's rows, in parts over data and fsdp."""
    sharding = NamedSharding(mesh, P(BATCH_AXES))
    return jax.make_array_from_process_local_data(sharding, local_BL, (rows, *local_BL.shape[1:]))


def spread(batch_BL: np.ndarray, mesh: Mesh, spec: P) -> jax.Array:
    """A batch that every process holds whole, laid out by `spec`."""
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(batch_BL.shape, sharding, lambda index: batch_BL[index])
