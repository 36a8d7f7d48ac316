"""A rank's side of snapshots: staging its data, following saves, and recovering them."""
