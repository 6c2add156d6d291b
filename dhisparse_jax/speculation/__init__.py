"""Speculative decoding: a draft proposes tokens, the target verifies them in one step.

protocol    what a drafter is, and what it proposes
ring        the draft's KV: the newest positions of each request
accept      which proposals stand, and the token after them; exact
schedule    how many proposals are worth verifying
"""
