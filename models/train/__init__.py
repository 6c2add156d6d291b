"""Package train."""
