"""Package train_indexer."""
