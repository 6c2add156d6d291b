"""What several operations share: the ids, row packing, memory spaces."""
