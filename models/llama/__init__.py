"""Package llama."""
