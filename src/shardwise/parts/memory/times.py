"""The limits, periods and pauses of snapshots in memory, in seconds, besides `Memory(wait=…)`."""

from __future__ import annotations

# How often something on this node is looked at.
POLL_PAUSE = 0.002  # a file that another process of the node is about to write
LONGEST_POLL_PAUSE = 0.02  # the same, if it takes longer; the server, for a client that waits
DEVICE_PAUSE = 0.0005  # whether a device has copied
LOOK_PERIOD = 0.05  # whether a snapshot that is being read was discarded, or is free by now
CHECK_PERIOD = 0.3  # whether the agent and other nodes live, while a rank waits for them
OBSERVE_PERIOD = 1.0  # the whole node, if no bell rings; the agent, by the training
UPKEEP_PERIOD = 10.0  # what costs more than a look: freed memory, the root of a run

# A request to another process.
SHORTEST_ATTEMPT = 0.2  # to connect; to wait for a reply, if many wait for a thread
LONGEST_ATTEMPT = 1.0  # to connect: the system sends a lost packet again after a second
FIRST_CONNECT_TIMEOUT = 0.5  # to nodes that may be gone, when a restore looks for snapshots
CONNECT_TIMEOUT = 5.0  # to nodes that have answered before
SHORTEST_TIMEOUT = 0.1  # what is left of the time of a caller
ANSWER_TIMEOUT = 5.0  # a small request; the first request, and the handshake, of a stranger
READ_TIMEOUT = 10.0  # a range of a file in a restore, which can take another copy
TRANSFER_TIMEOUT = 30.0  # a range of a file that only one node has; a client that reads slowly
LONGEST_WAIT = 60.0  # all requests of a search for snapshots; what a client may ask to wait
IDLE_CONNECTION_TIMEOUT = 90.0  # longer than any client waits between two requests of a save
SHUTDOWN_TIMEOUT = 2.0  # for responses that are being sent when an agent ends, and for its lock
RETRY_PAUSE = 0.2  # between two attempts to reach a node: an agent that died is replaced in seconds

# Nodes and agents that do not answer.
LONGEST_REPLY_WAIT = 5.0  # a call to a node, until it is repeated
OUTCOMES_WAIT = 1.0  # a request for outcomes, until it is repeated
NODE_LOST_AFTER = 1.2  # no connection to a node: long enough for a lost packet to be sent again
SHORT_PATIENCE = 5.0  # where waiting longer costs more than going on without: see its uses
GONE_AFTER = 10.0  # no agent on this node; no news of a save from the node that leads it

# Agents that start and end.
START_TIMEOUT = 60.0  # to import torch on a busy machine
MOST_STARTS, START_PERIOD = 5, 60.0  # an agent that ends so often is not started any more
LOCK_TIMEOUT = 10.0  # for a process that ends to release its locks
STOP_TIMEOUT = 20.0  # for writes in progress
DELETION_TIMEOUT = 1.5  # for the system to free the memory of files that agents have deleted
FREE_TIMEOUT = 30.0  # for an agent to release a snapshot that a training discards
CHILD_TIMEOUT = 60.0  # for a process that computes checksums

# What is tried again, and given up.
NOTICE_PERIOD = 2.0  # until a rank that waits says that a stage is tried again
RETRY_PERIOD = 60.0  # the longest pause between two attempts, and between two messages about them
FORGET_AFTER = 600.0  # an attempt that was so long ago does not count; a copy may take so long
UNTIL_UNFOLLOWED = 120.0  # without trainers: nobody waits for the outcomes of stages any more
UNTIL_FREED_IF_STORED = 1800.0  # without trainers: storage has the snapshots
DAY = 86400.0  # an outage of storage; snapshots of a run that nobody restarts
WEEK = 7 * DAY  # the address of an agent that has not been heard of since
