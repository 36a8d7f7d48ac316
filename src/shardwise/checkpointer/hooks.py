"""The hooks of a run: those of shardwise, and those of other packages."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from shardwise.kernel.errors import ShardwiseError
from shardwise.kernel.plugins import PluginError, call_plugin, find_plugins, ignore_failure
from shardwise.ports.hooks import GROUP, MakeHook, Run, RunHook

log = logging.getLogger("shardwise")


class RunHooks:
    """The hooks of a run, called one after the other."""

    def __init__(self) -> None:
        self._hooks: list[RunHook] = []

    def add(self, hook: RunHook) -> None:
        """Add a hook, which is called after the others."""
        self._hooks.append(hook)

    def call(self, method: str, *arguments: object, **options: object) -> None:
        """Call a method of all hooks, also if one raises.

        Raises:
            ShardwiseError: the first that a hook raised. Other exceptions are logged.
        """
        failures: list[ShardwiseError] = []
        for hook in self._hooks:
            try:
                getattr(hook, method)(*arguments, **options)
            except ShardwiseError as error:  # noqa: PERF203 - few hooks
                failures.append(error)
            except Exception:
                log.exception("%s of the hook %r failed; the training continues", method, hook)
        if failures:
            raise failures[0]


def make_hooks_of_others(run: Run, make_hooks: Iterable[MakeHook]) -> list[RunHook]:
    """Return the hooks of a run that are not shardwise's own.

    Args:
        run: the run.
        make_hooks: make the hooks that the user passed. Those of other packages come after them.

    Raises:
        ShardwiseError: of a hook of the user, or raised by the function of a package. Other
            failures of packages are logged, because the program may not need their hooks.
    """
    made = [make(run) for make in make_hooks]
    for entry in find_plugins(GROUP):
        try:
            made.append(call_plugin(entry, RunHook, run))
        except PluginError as error:  # noqa: PERF203 - few plug-ins
            ignore_failure(error)
    return [hook for hook in made if hook is not None]
