"""What a save costs the busiest process of a very large job, and what opening and a load cost.

The job trains Llama-3.1-405B with AdamW, in float32. `scale_messages.py` says how its ranks are
simulated: one process is real at a time, and replays the messages that it receives. Seconds are
those of its processor. They include encoding and decoding messages, but not the sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing import get_context
from statistics import median
from typing import Any, TypeVar

from benchmarks.harness import NO_TENSORS, Bench, parse_arguments, round_digits
from benchmarks.scale_messages import save_messages, watched_ranks
from benchmarks.scale_ranks import Cost, CostOfRank, load_rank, measure_rank
from benchmarks.scale_states import Job

JOBS = (
    Job(tp=8, pp=1, dp=8),
    Job(tp=8, pp=4, dp=8),
    Job(tp=8, pp=16, dp=8),
    Job(tp=8, pp=16, dp=32),
    Job(tp=8, pp=16, dp=128),
    Job(tp=8, pp=16, dp=256),
    Job(tp=8, pp=16, dp=512),
    Job(tp=8, pp=16, dp=1024),
)
OTHERS = {
    "bfloat16 parameters": Job(tp=8, pp=16, dp=128, half=True),
    "HSDP, 4 replicas": Job(tp=8, pp=16, dp=32, replicas=4),
    "a value of each rank": Job(tp=8, pp=16, dp=128, has_generators=True),
    "a tensor on rank 0 only": Job(tp=8, pp=16, dp=128, has_counter=True),
    "flat ranges": Job(tp=1, pp=1, dp=256, is_flat=True),
}
"""Other states."""
LARGE, LARGEST = 16_384, 131_072
T = TypeVar("T")


def main() -> None:
    options = parse_arguments()
    bench = Bench("scale", NO_TENSORS, options)
    jobs = JOBS[:3] if bench.quick else JOBS
    of_last = measure_job(bench, jobs[-1], ["root", "aggregator", "leaf"])
    costs = {job.world: measure_job(bench, job)["root"] for job in jobs[:-1]}
    costs[jobs[-1].world] = of_last["root"]
    bench.table("Rank 0, by the number of ranks", [row(job, costs[job.world]) for job in jobs])
    ranks = [{"rank": name} | plan_row(cost) for name, cost in of_last.items()]
    bench.table(f"Ranks of {jobs[-1].world:,}", ranks)
    others = {} if bench.quick else OTHERS
    rows = []
    for name, job in others.items():
        cost = measure_job(bench, job)["root"]
        rows.append({"state": name} | row(job, cost))
    if rows:
        bench.table("Other states, rank 0", rows)
    loads = {job.world: measure_load(bench, job, costs[job.world].manifest) for job in jobs}
    bench.table(
        "Open the manifest, and plan one rank's load into other parallelism", [*loads.values()]
    )
    set_goals(bench, costs, loads)
    bench.finish()


def set_goals(bench: Bench, costs: dict[int, CostOfRank], loads: dict[int, dict[str, Any]]) -> None:
    """Compare the figures with the goals."""
    for world, seconds, received in ((LARGE, 0.5, 5), (LARGEST, 1.5, 20)):
        if world in costs:
            first, text = costs[world].first_plan, f"first plan, {world:,} ranks"
            bench.goal(f"{text}: seconds", first.seconds, most=seconds)
            bench.goal(f"{text}: MB received", first.received / 1e6, most=received)
            bench.goal(f"{text}: MB of memory", first.memory, most=300)
    if LARGEST in costs:
        cached, text = costs[LARGEST].cached_plan, f"cached plan, {LARGEST:,} ranks"
        bench.goal(f"{text}: ms", 1000 * cached.seconds, most=20)
        bench.goal(f"{text}: MB received", cached.received / 1e6, most=1)
    for world, most in ((LARGE, 5), (LARGEST, 16)):
        if world in costs:
            size = len(costs[world].manifest) / 1e6
            bench.goal(f"manifest, {world:,} ranks: MB", size, most=most)
    if LARGEST in loads:
        load, text = loads[LARGEST], f"open, and plan a load, {LARGEST:,} ranks"
        bench.goal(f"{text}: seconds", load["open, seconds"] + load["plan, seconds"], most=0.5)
        bench.goal(f"{text}: MB of memory", load["memory, MB"], most=300)
    parts: dict[str, Callable[[CostOfRank], float]] = {
        "first plan": lambda cost: cost.first_plan.seconds,
        "first save": lambda cost: cost.first_plan.seconds + cost.publish.seconds,
        "cached plan": lambda cost: cost.cached_plan.seconds,
        "cached save": lambda cost: cost.cached_plan.seconds + cost.publish_again.seconds,
    }
    for name, part in parts.items():
        ratios = [
            part(costs[4 * world]) / part(cost)
            for world, cost in costs.items()
            if 4 * world in costs
        ]
        bench.goal(f"{name}: growth for 4 × the ranks, at most", max(ratios), most=1.5)
    last = max(costs)
    rounds = costs[last].cached_plan.rounds + costs[last].publish.rounds
    bench.goal("messages of a cached save: times up and down", rounds, most=2)


def row(job: Job, cost: CostOfRank) -> dict[str, object]:
    """Return a row about one job."""
    return {
        "ranks": job.world,
        "TP × PP × DP": job.text,
        **plan_row(cost),
        "publish, seconds": round_digits(cost.publish.seconds),
        "again, seconds": round_digits(cost.publish_again.seconds),
        "manifest, MB": round_digits(len(cost.manifest) / 1e6),
    }


def plan_row(cost: CostOfRank) -> dict[str, object]:
    """Return the part of a row about plans."""
    first, cached = cost.first_plan, cost.cached_plan
    return {
        "first plan, seconds": round_digits(first.seconds),
        "MB received": round_digits(first.received / 1e6),
        "MB sent": round_digits(first.sent / 1e6),
        "memory, MB": first.memory,
        "cached plan, ms": round_digits(1000 * cached.seconds),
        "KB received": round_digits(cached.received / 1e3),
    }


def measure_job(bench: Bench, job: Job, names: Sequence[str] = ("root",)) -> dict[str, CostOfRank]:
    """Return the costs of some ranks of a job: medians over the rounds."""
    directory = bench.dir / str(len([*bench.dir.iterdir()]))
    directory.mkdir()
    ranks = {name: rank for name, rank in watched_ranks(job) if name in names}
    in_new_process(save_messages, job, [*ranks.values()], directory)
    return {
        name: median_of([in_new_process(measure_rank, job, rank, directory) for _ in bench.rounds])
        for name, rank in ranks.items()
    }


def in_new_process(function: Callable[..., T], *arguments: object) -> T:
    """Return what a function returns in a new process."""
    processes = get_context("forkserver")
    processes.set_forkserver_preload(["benchmarks.scale_ranks"])
    with processes.Pool(1) as pool:
        return pool.apply(function, arguments)


def median_of(costs: Sequence[CostOfRank]) -> CostOfRank:
    """Return the medians of the seconds and of the memory; all else is equal."""

    def join(parts: Sequence[Cost]) -> Cost:
        seconds = median(each.seconds for each in parts)
        memory = max(each.memory for each in parts)
        first = parts[0]
        return Cost(seconds, first.received, first.sent, first.rounds, memory)

    return CostOfRank(
        join([each.first_plan for each in costs]),
        join([each.cached_plan for each in costs]),
        join([each.publish for each in costs]),
        join([each.publish_again for each in costs]),
        costs[0].manifest,
    )


def measure_load(bench: Bench, job: Job, manifest: bytes) -> dict[str, Any]:
    """Return a row: the cost of a load by one rank of as many, with other parallelism."""
    other = Job(tp=4, pp=min(8, job.world // 4), dp=max(1, job.world // 32))
    path = bench.dir / "manifest"
    path.write_bytes(manifest)
    found = [in_new_process(load_rank, other, path) for _ in bench.rounds]
    return {
        "ranks": job.world,
        "from": job.text,
        "to": other.text,
        "open, seconds": round_digits(median(each[0] for each in found)),
        "plan, seconds": round_digits(median(each[1] for each in found)),
        "memory, MB": max(each[2] for each in found),
        "reads": found[0][3],
    }


if __name__ == "__main__":
    main()
