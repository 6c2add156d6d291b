"""The DSpark that a checkpoint of DeepSeek-V4 or V4.1 has attached, in its `mtp` tensors.

`configs.attached` says what one is, `model` has its layers, `drafter` makes it usable by the
library's speculation, and `load` finds it in a checkpoint.
"""
