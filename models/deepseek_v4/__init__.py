"""DeepSeek-V4 as Flax NNX modules, and over the KV hierarchy."""
