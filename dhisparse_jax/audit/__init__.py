"""Whether the exactness promises E0 to E3 hold here, shown by running them.

findings   what a level promises, what was counted, and the first difference
observe    a step that also returns what every group selected, found and attended
lockstep   the same texts under a policy and under `resident`, step by step
records    E0: what is where, and whether it is what it should be
outputs    E1: attended values and logits, bit for bit
greedy     E2: tokens with a draft and without
sampled    E3: the rule of acceptance enumerated, and drawn through
rehearsed  a drafter for models that have none
levels     all of it in order
"""
