"""Data loading that resumes exactly, with any number of ranks and workers.

`ElasticBatchSampler` is for map datasets, `ElasticStreamLoader` for iterable sources, mixtures and
packing. `PerRankLoader` keeps the state of torchdata's `StatefulDataLoader`. Put each of them into
the state that you save; see docs/data.md.
"""

from shardwise.data.batch_sampler import ElasticBatchSampler
from shardwise.data.packing import BestFitPacker, ConcatPacker, Packer
from shardwise.data.per_rank_loader import PerRankLoader
from shardwise.data.sources import FileSource, MapSource, Source
from shardwise.data.stream_loader import ElasticStreamLoader
from shardwise.data.streams import ElasticStreamDataset

__all__ = [
    "BestFitPacker",
    "ConcatPacker",
    "ElasticBatchSampler",
    "ElasticStreamDataset",
    "ElasticStreamLoader",
    "FileSource",
    "MapSource",
    "Packer",
    "PerRankLoader",
    "Source",
]
