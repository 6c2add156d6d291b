"""Package hierarchy."""
