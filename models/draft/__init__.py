"""Block drafters: DFlash, DFlash2 and DSpark, from their published parts.

`config` says what a draft is, `backbone` has the layers that all three share, `dflash2` and
`dspark` the heads that they do not share, `block` runs draft blocks over whole sequences or over a
ring, and `drafter` makes them usable by the library's speculation. `registry.load_draft` opens one.
"""
