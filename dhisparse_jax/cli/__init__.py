"""The `dhisparse` command.

main                entry point: sub-commands, errors to one line, exit codes
decode              `dhisparse decode`: continue texts
serve               `dhisparse serve`: requests that arrive over time
evaluate            `dhisparse evaluate`: bits per byte of files
convert             `dhisparse convert`: a published checkpoint as one that loads faster
verify_hf           `dhisparse verify-hf`: compare with a reference's logits
doctor              `dhisparse doctor`: what the machine is to the hierarchy
audit               `dhisparse audit`: whether E0 to E3 hold here
plan                `dhisparse plan`: what fits on a deployment's GPUs, and how fast

options             options that several commands have, with their help texts
format_options      of what history is kept in
sampling_options    of how a token is chosen
mesh_options        of several devices and processes
checking_options    of `doctor` and `audit` only
checkpoint_options  of `convert` and `verify-hf` only
plan_options        of `plan` only
serve_options       of `serve` only
checks              what an option refuses

session             a model and an engine, made from the options
prompts             prompt files, and the prompts that are used without one
trace_file          request traces, of which `serve` replays one
selections          what every step selects, in a file for the simulator
record              what a run did, gathered from the engine's events
serving             what a replay did, over time
meeting             several processes meet, and notice when one ends
interrupt           Ctrl-C and termination, also where a library swallows them
display             what a person sees while it runs
serve_display       what a person sees while a trace is replayed
text                generated tokens as text: streamed, shortened, made safe
tables              the tables at the end
doctor_tables       those of `doctor`
machine             what is known of a machine without measuring
advice              what to change about it
report              the JSON documents, written whole or not at all

jax and flax are imported inside the commands only, so that `--help` answers at once.
"""
