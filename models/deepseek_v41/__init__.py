"""DeepSeek-V4.1 (the text path) as Flax NNX modules, and over the KV hierarchy."""
