"""`NodeAgent`: run the agent of this node, look at it, stop it, and remove its snapshots."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from shardwise.kernel.errors import StoreError
from shardwise.parts.memory.agent.status import NodeStatus, RunStatus, read_runs, read_status
from shardwise.parts.memory.agent.watch import ProgressWatch
from shardwise.parts.memory.home import Home
from shardwise.parts.memory.identity import LOOPBACK
from shardwise.parts.memory.options import DEFAULT_DIRECTORY, Tls
from shardwise.parts.memory.rank_liveness import is_training
from shardwise.parts.memory.reclaim import clear_run
from shardwise.parts.memory.spawn import RotatingLog, end_agent, running_agent


class NodeAgent:
    """The agent of this node, and the snapshots that it keeps. `shardwise agent` uses this class.

    Training starts an agent automatically if none is running.

    Example:

        for run in sw.NodeAgent().status().runs:
            print(run.run, [each.step for each in run.snapshots], run.lag["persist"].seconds)

    Args:
        dir: the directory of the node's snapshots, as in `Memory`.
        tls: the certificates of the agent, as in `Memory`.
    """

    def __init__(
        self,
        dir: str | os.PathLike[str] = DEFAULT_DIRECTORY,  # noqa: A002 - as in `Memory`
        *,
        tls: Tls | None = None,
    ) -> None:
        self._directory = Path(dir)
        self._tls = tls

    def run(
        self,
        *,
        interface: str = LOOPBACK,
        port: int = 0,
        domain: str = "",
        secret_file: str | os.PathLike[str] | None = None,
        until_idle: bool = False,
        log: str | os.PathLike[str] | None = None,
    ) -> bool:
        """Run the agent in this process until SIGTERM or SIGINT, or until it is idle.

        Args:
            interface: the address or the network interface that other nodes connect to.
            port: the port. 0: the port of the previous agent if it is free, else any port.
            domain: the failure domain of this node, for example its rack.
            secret_file: the secret that all nodes share. Default: made in the directory.
            until_idle: return when no snapshots and no training remain.
            log: log to this file, of at most 2 MB, and redirect stdout and stderr there. Default:
                stderr.

        Returns:
            Whether all actions in progress have finished. If not, threads are still working, and
            the next agent repeats their actions.

        Raises:
            StoreError: another agent runs on the node, or an option is invalid.
        """
        from shardwise.parts.memory.agent.process import run_agent

        logging.basicConfig(
            level=logging.INFO,
            format="%(asctime)s %(levelname)s %(message)s",
            handlers=[logging.StreamHandler() if log is None else RotatingLog(Path(log))],
            force=True,
        )
        return run_agent(
            self._directory,
            interface=interface,
            port=port,
            domain=domain,
            tls=self._tls,
            secret_file=None if secret_file is None else Path(secret_file),
            until_idle=until_idle,
        )

    def status(self) -> NodeStatus:
        """Return the status of the agent, the runs, their snapshots, and the mirrors."""
        return read_status(Home(self._directory), self._tls)

    def watch(self) -> ProgressWatch:
        """Return what shows the present stage of each rank of the runs that train on this node."""
        return ProgressWatch(Home(self._directory), self._tls)

    def runs(self) -> list[RunStatus]:
        """Return the status of the runs that have snapshots on this node.

        Raises:
            StoreError: the directory has no snapshots of this user.
        """
        return read_runs(self._existing_home())

    def clear(self, runs: Sequence[str], *, force: bool = False) -> None:
        """Remove the snapshots of runs from the memory of this node. Checkpoints stay.

        Args:
            runs: the ids of the runs.
            force: also clear runs that are training on this node.

        Raises:
            StoreError: a run is unknown, or is training on this node. Nothing was removed.
        """
        home = self._existing_home()
        stored = {each.run: each for each in read_runs(home)}
        if unknown := [run for run in runs if run not in stored]:
            raise StoreError(
                f"nothing was removed: {home} has no snapshots of run {', '.join(unknown)}. "
                f"Choose --run from: {', '.join(stored) or 'none'}"
            )
        training = [run for run in runs if stored[run].training]
        if training and not force:
            raise StoreError(
                f"nothing was removed: run {', '.join(training)} is training on this node and "
                "would lose its snapshots. Stop the training first, or pass --force"
            )
        for run in runs:
            clear_run(home, home.run(run), force=force)

    def stop(self, *, force: bool = False) -> str:
        """Stop the agent, which first finishes its current writes. The snapshots stay.

        Args:
            force: stop it even if training runs on this node, which would start another agent.

        Returns:
            The name of the node.

        Raises:
            StoreError: no agent runs, training runs on this node, or the agent does not stop.
        """
        home = self._existing_home()
        info = running_agent(home)
        if info is None and not home.has_agent():
            raise StoreError(f"nothing to stop: no agent is running in {home}")
        if info is None:
            raise StoreError(
                f"the agent of {home} is starting or stopping: try again in a few seconds"
            )
        if is_training(home) and not force:
            raise StoreError(
                "the agent was not stopped: training runs on this node, and would start another "
                f"agent in place of process {info.process}. Stop the training first, or pass "
                "--force"
            )
        end_agent(home, info)
        return info.node

    def _existing_home(self) -> Home:
        """Return this user's snapshots in the directory, without creating anything.

        Raises:
            StoreError: the directory has no snapshots of this user.
        """
        if not (self._directory / f"shardwise-{os.getuid()}").exists():
            raise StoreError(
                f"--dir {self._directory}: the directory has no snapshots of this user. Pass the "
                "directory that the training uses"
            )
        return Home(self._directory)
