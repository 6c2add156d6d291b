"""The `dhisparse` command.

main        entry point: sub-commands, errors to one line, exit codes
options     every option, with its help text
checks      what an option refuses
decode      `dhisparse decode`: continue texts
evaluate    `dhisparse evaluate`: bits per byte of files
verify_hf   `dhisparse verify-hf`: compare with a reference's logits
doctor      `dhisparse doctor`: what the machine is to the hierarchy
audit       `dhisparse audit`: whether E0 to E3 hold here
session     a model and an engine, made from the options
prompts     prompt files, and the prompts that are used without one
record      what a run did, gathered from the engine's events
interrupt   Ctrl-C and termination, also where a library swallows them
display     what a person sees while it runs
text        generated tokens as text: streamed, shortened, made safe
tables      the tables at the end
machine     what is known of a machine without measuring
advice      what to change about it
report      the JSON documents, written whole or not at all

jax and flax are imported inside the commands only, so that `--help` answers at once.
"""
