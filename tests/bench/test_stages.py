"""Stages of kernels: from their own names, from their scopes, or from who ran before them."""

from bench.stages import Event, Kernel, by_stage, scopes_of, stages_of

TEXT = """
  %rows.2 = s8[32,64] fusion(%x), calls=%f, metadata={op_name="jit(g)/experts/gather"}
  ROOT %sum.7 = bf16[32,8] fusion(%y), metadata={op_name="jit(g)/combine/add"}
  %cast.8 = bf16[32,8] convert(%sum.7), metadata={op_name="jit(g)/convert_element_type"}
"""

RAN = {
    "nvjet_sm90_qqtst": "other",  # nothing ran before it
    "rows_2": "experts",
    "nvjet_sm90_qqsss": "experts",
    "sum_7": "attention weights",
    "cast_8": "other",  # the program has it, in no stage
    "index_scores_kernel": "index",
    "memcpy32_post": "index",
}


def test_a_kernel_that_no_instruction_has_belongs_to_the_one_before():
    events = [Event(Kernel("g", name, name), float(at), 1.0) for at, name in enumerate(RAN)]
    scopes = {"g": scopes_of(TEXT)}
    assert dict(zip(RAN, stages_of(events, scopes), strict=True)) == RAN
    assert by_stage(events, scopes) == {
        "other": 2.0,
        "experts": 2.0,
        "attention weights": 1.0,
        "index": 2.0,
    }
