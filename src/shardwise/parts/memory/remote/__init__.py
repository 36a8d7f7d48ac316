"""Other nodes' agents: requests to them, and snapshots put together from what they hold."""
