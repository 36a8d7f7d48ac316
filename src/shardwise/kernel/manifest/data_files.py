"""The data files of a checkpoint: one by one, in columns, and by rule in a manifest.

For example, ranks 0 to 4095 wrote files of equal sizes. A manifest lists them in one entry, with
the checksum of each. Their names follow from the ranks and the id of the save.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, overload

import msgspec
import numpy as np

from shardwise.kernel.boxes.box import IntArray, count_up
from shardwise.kernel.boxes.grids import split_runs
from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.errors import FormatError

LARGEST_INTEGER = 2**62
MOST_RANKS = 2**20
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_INTEGER)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]
Crc = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
OtherId = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
MostRanks = msgspec.Meta(max_length=MOST_RANKS)
SHORTEST_RUN = 3

_DATA_FILE = re.compile(r"r(\d{5,})-([0-9a-f]{16})\.safetensors")


@prepare_decoding
class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A data file, whose parts follow each other without gaps.

    The header is in `[0, data_at)`, the pieces are in `[data_at, objects_at)`, and the plain values
    of the rank in `[objects_at, checksums_at)`. The checksums of all bytes before them are in
    `[checksums_at, size)`.

    Attributes:
        name: the name of the file.
        rank: the rank that wrote the file.
        size: the size of the file, in bytes.
        data_at, objects_at, checksums_at: offsets of the parts, in bytes.
        checksums_crc32: the CRC-32 of the table of checksums.
    """

    name: str
    rank: Count
    size: Count
    data_at: Count
    objects_at: Count
    checksums_at: Count
    checksums_crc32: Crc


@prepare_decoding
class FileRule(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Data files with parts of equal sizes.

    Attributes:
        ranks: the ranks that wrote them, as triples: the first rank, the number of ranks, and the
            distance between two ranks.
        size, data_at, objects_at, checksums_at: as in `FileEntry`.
        checksums_crc32: the CRC-32 of each file's table of checksums.
        save_id: the id in the names of the files; None for that of the manifest. Ranks that
            save through DCP write before they know the id of the save.
    """

    ranks: Annotated[tuple[tuple[Rank, Rank, Rank], ...], MostRanks]
    size: Count
    data_at: Count
    objects_at: Count
    checksums_at: Count
    checksums_crc32: Annotated[tuple[Crc, ...], MostRanks]
    save_id: OtherId | None = None


def data_file(rank: int, save_id: str) -> str:
    """Return the name of a rank's data file."""
    return f"r{rank:05d}-{save_id}.safetensors"


def save_id_of_file(name: str) -> str | None:
    """Return the save id in the name of a data file; None for any other name."""
    match = _DATA_FILE.fullmatch(name)
    return match.group(2) if match else None


class FileTable(Sequence[FileEntry]):
    """The data files of a save, in ascending order of their ranks; see `FileEntry`.

    Args:
        save_id: the id of the save.
        numbers: a row for each file, `(n, 6)`: rank, size, data_at, objects_at, checksums_at and
            checksums_crc32.
        other_ids: the id in the name of a rank's file, if it is not `save_id`.
    """

    __slots__ = ("numbers", "other_ids", "save_id")

    def __init__(
        self, save_id: str, numbers: IntArray, other_ids: Mapping[int, str] | None = None
    ) -> None:
        self.save_id = save_id
        self.numbers = numbers
        self.other_ids = other_ids or {}

    @classmethod
    def of(cls, files: Sequence[FileEntry], save_id: str) -> FileTable:
        """Return the table of some files.

        Raises:
            FormatError: a name is not that of a data file, or the ranks are not in ascending order.
        """
        if isinstance(files, FileTable):
            return files
        other_ids = {}
        for file in files:
            file_id = save_id_of_file(file.name) or save_id
            if file.name != data_file(file.rank, file_id):
                raise FormatError(
                    f"the file of rank {file.rank} has the name {file.name[:200]!r}, which is not "
                    "safe to open: the names of data files consist of the rank and the id of a save"
                )
            if file_id != save_id:
                other_ids[file.rank] = file_id
        rows = [msgspec.structs.astuple(file)[1:] for file in files]
        table = cls(save_id, np.array(rows, np.int64).reshape(len(rows), 6), other_ids)
        table.check_ranks()
        return table

    def _entry(self, row: list[int]) -> FileEntry:
        name = data_file(row[0], self.other_ids.get(row[0], self.save_id))
        return FileEntry(name, *row)

    @overload
    def __getitem__(self, index: int) -> FileEntry: ...
    @overload
    def __getitem__(self, index: slice) -> list[FileEntry]: ...
    def __getitem__(self, index: int | slice) -> FileEntry | list[FileEntry]:
        """Return the file with this index."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._entry(self.numbers[index].tolist())

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[FileEntry]:
        return map(self._entry, self.numbers.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FileTable):
            same_ids = (self.save_id, self.other_ids) == (other.save_id, other.other_ids)
            return same_ids and np.array_equal(self.numbers, other.numbers)
        return isinstance(other, Sequence) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]

    @property
    def names(self) -> list[str]:
        """The names of the files."""
        ranks, other_ids, save_id = self.numbers[:, 0].tolist(), self.other_ids, self.save_id
        if not other_ids:
            return [data_file(rank, save_id) for rank in ranks]
        return [data_file(rank, other_ids.get(rank, save_id)) for rank in ranks]

    @property
    def nbytes(self) -> int:
        """The size of all files, in bytes."""
        return sum(self.numbers[:, 1].tolist())

    def index_of_rank(self, rank: int) -> int | None:
        """Return the index of the file of a rank; None if the rank wrote none."""
        at = int(np.searchsorted(self.numbers[:, 0], rank))
        return at if at < len(self) and self.numbers[at, 0] == rank else None

    def index_of(self, name: str) -> int | None:
        """Return the index of a file; None if there is none of this name."""
        match = _DATA_FILE.fullmatch(name)
        if match is None or len(match[1]) > len(str(MOST_RANKS)):
            return None
        rank = int(match[1])
        index = self.index_of_rank(rank)
        return None if index is None or self[index].name != name else index

    def check_ranks(self) -> None:
        """Check that the ranks ascend.

        Raises:
            FormatError: they do not, or two files have the same rank.
        """
        wrong = np.flatnonzero(np.diff(self.numbers[:, 0]) <= 0)
        if len(wrong):
            first, second = self.numbers[wrong[0] : wrong[0] + 2, 0].tolist()
            raise FormatError(
                f"the manifest lists two files of rank {first}"
                if first == second
                else f"the manifest lists the file of rank {second} after that of rank {first}: "
                "expected ascending order"
            )


def rules_of(table: FileTable) -> list[FileRule]:
    """Return the rules that describe the files."""
    if not len(table):
        return []
    ranks, sums = table.numbers[:, 0], table.numbers[:, 5]
    ids = [table.save_id, *sorted(set(table.other_ids.values()))]
    number_of = {file_id: number for number, file_id in enumerate(ids)}
    id_of = np.zeros(len(table), np.int64)
    for rank, file_id in table.other_ids.items():
        id_of[table.index_of_rank(rank)] = number_of[file_id]
    keys = np.column_stack([table.numbers[:, 1:5], id_of])
    starts = np.flatnonzero(np.append(True, (keys[1:] != keys[:-1]).any(1)))
    numbers: dict[tuple[int, ...], int] = {}
    which = [numbers.setdefault(tuple(key), len(numbers)) for key in keys[starts].tolist()]
    kinds = np.repeat(np.array(which, np.int64), np.diff(np.append(starts, len(keys))))
    order = np.argsort(kinds, kind="stable")
    members = np.split(order, np.searchsorted(kinds[order], range(1, len(numbers))))
    rules = []
    for (size, data_at, objects_at, checksums_at, number), rows in zip(
        numbers, members, strict=True
    ):
        triples = tuple(_progressions(ranks[rows]))
        crc32 = tuple(sums[rows].tolist())
        other_id = ids[number] if number else None
        rules.append(FileRule(triples, size, data_at, objects_at, checksums_at, crc32, other_id))
    return rules


def _progressions(ranks: IntArray) -> Iterator[tuple[int, int, int]]:
    """Yield the first rank, number of ranks and distance of runs of ascending ranks."""
    steps = np.diff(ranks)
    continues = np.zeros(len(ranks), bool)
    continues[2:] = steps[1:] == steps[:-1]
    rows, counts = split_runs(continues, SHORTEST_RUN)
    for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
        yield int(ranks[row]), count, int(steps[row]) if count > 1 else 1


def files_of_rules(rules: Sequence[FileRule], save_id: str) -> FileTable:
    """Return the files that rules of a manifest describe.

    Raises:
        FormatError: a rule has more or fewer checksums than ranks, or a rank twice; or there are
            too many ranks.
    """
    if sum(len(rule.checksums_crc32) for rule in rules) > MOST_RANKS:
        raise FormatError(f"the manifest lists the files of more than {MOST_RANKS:,} ranks")
    sizes = []
    triples: list[tuple[int, int, int]] = []
    sums: list[int] = []
    other_ids: dict[int, str] = {}
    for rule in rules:
        count = sum(each[1] for each in rule.ranks)
        if count != len(rule.checksums_crc32):
            raise FormatError(
                f"the manifest lists {count} ranks with {len(rule.checksums_crc32)} checksums: "
                "expected one checksum for each rank's file"
            )
        triples += rule.ranks
        sizes.append((count, rule.size, rule.data_at, rule.objects_at, rule.checksums_at))
        sums += rule.checksums_crc32
        if rule.save_id is not None:
            for first, times, step in rule.ranks:
                other_ids |= {first + k * step: rule.save_id for k in range(times)}
    firsts, counts, steps = np.array(triples, np.int64).reshape(-1, 3).T
    numbers = np.empty((len(sums), 6), np.int64)
    numbers[:, 0] = np.repeat(firsts, counts) + count_up(counts) * np.repeat(steps, counts)
    columns = np.array(sizes, np.int64).reshape(-1, 5)
    numbers[:, 1:5] = np.repeat(columns[:, 1:], columns[:, 0], axis=0)
    numbers[:, 5] = sums
    table = FileTable(save_id, numbers[np.argsort(numbers[:, 0], kind="stable")], other_ids)
    table.check_ranks()
    return table
