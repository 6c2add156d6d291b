"""Package configs."""
