"""Package common."""
