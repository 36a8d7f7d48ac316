"""The results of checks that run on demand: `Checkpoint.verify` and `Checkpoint.compare`."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.kernel.events import format_bytes, format_count

GROUP = "shardwise.checks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Bytes of a checkpoint that differ from the bytes that were saved.

    Attributes:
        file: the name of the file; None if two copies of a tensor differ.
        start, stop: the range of damaged bytes; None if the whole file is damaged or missing.
        problem: a description of the damage.
        tensors: the names of the tensors that have bytes in the range.
    """

    file: str | None
    start: int | None = None
    stop: int | None = None
    problem: str
    tensors: list[str]

    def __str__(self) -> str:
        if self.start is None:
            return self.problem
        shown = ", ".join(self.tensors[:5]) + (", …" if len(self.tensors) > 5 else "")
        return (
            f"{self.file}: bytes {self.start}:{self.stop} are {self.problem}"
            f"{f' ({shown})' if shown else ''}"
        )


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of a verification.

    Attributes:
        path: the path of the checkpoint.
        step: the training step of the checkpoint, if it has one.
        files: the number of files of which bytes were compared with checksums.
        bytes_checked: the number of bytes that were compared with checksums.
        bytes_compared: the number of bytes of the other copies of tensors, which loads do not
            read. They were compared with the copies that loads read.
        bytes_unchecked: the number of bytes of tensors that have no checksum.
        damage: what is damaged. `Checkpoint.verify` raises an error instead.
        seconds: the duration of each file's check, and `total`, in seconds.
    """

    path: str
    step: int | None
    files: int
    bytes_checked: int
    bytes_compared: int
    bytes_unchecked: int
    damage: tuple[Damage, ...]
    seconds: dict[str, float]

    @property
    def intact(self) -> bool | None:
        """Whether there is no damage; None if nothing could be checked."""
        if self.damage:
            return False
        return True if self.files or self.bytes_compared else None

    def __repr__(self) -> str:
        damaged = f", {len(self.damage)} damaged" if self.damage else ""
        return f"<VerifyReport: {format_bytes(self.bytes_checked)} checked{damaged}>"

    def __str__(self) -> str:
        compared = f", {format_bytes(self.bytes_compared)} of copies compared"
        without = f", {format_bytes(self.bytes_unchecked)} without checksums"
        return (
            f"verified {self.path}: {format_bytes(self.bytes_checked)} checked"
            f"{compared if self.bytes_compared else ''}{without if self.bytes_unchecked else ''}"
            f", in {self.seconds['total']:.2f} s" + "".join(f"\n  {each}" for each in self.damage)
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """What a name has in checkpoint A and in checkpoint B: a kind, dtype, shape or value.

    Values are encoded as in the manifest.
    """

    name: str
    a: object
    b: object


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor whose bytes differ.

    Attributes:
        elements: the number of elements.
        differing: the number of elements whose bytes differ.
        max_abs_difference: the largest |a - b|. NaN if a or b is NaN in an element that differs.
            None for dtypes without arithmetic.
    """

    name: str
    elements: int
    differing: int
    max_abs_difference: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All differences between two checkpoints; see `Checkpoint.compare`.

    Attributes:
        a, b: the paths of the checkpoints.
        same: whether there are no differences.
        tensors_compared: the number of tensors whose bytes were compared.
        only_in_a, only_in_b: the names in one checkpoint only.
        kinds: the names of a tensor in one checkpoint and of a plain value in the other.
        dtypes, shapes: the tensors with other dtypes and shapes.
        values: the plain values that differ; parts of values have dotted names.
        tensors: the tensors whose bytes differ.
    """

    a: str
    b: str
    same: bool
    tensors_compared: int
    only_in_a: list[str]
    only_in_b: list[str]
    kinds: list[Difference]
    dtypes: list[Difference]
    shapes: list[Difference]
    values: list[Difference]
    tensors: list[TensorDifference]

    @property
    def differences(self) -> int:
        """The number of differences."""
        names = len(self.only_in_a) + len(self.only_in_b) + len(self.kinds)
        return names + len(self.dtypes) + len(self.shapes) + len(self.values) + len(self.tensors)

    def __str__(self) -> str:
        found = "the same" if self.same else format_count(self.differences, "difference")
        return f"{self.a} and {self.b}: {found}"
