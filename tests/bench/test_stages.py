"""Stages of kernels: from their own names, from their scopes, or from who ran before them."""

from bench.stages import Event, Kernel, by_stage, stages_of, traced

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
    programs = {"g": traced(TEXT)}
    assert dict(zip(RAN, stages_of(events, programs), strict=True)) == RAN
    assert by_stage(events, programs) == {
        "other": 2.0,
        "experts": 2.0,
        "attention weights": 1.0,
        "index": 2.0,
    }


CALLS = """
  %cast.1 = s8[32,64] fusion(%x), calls=%f, metadata={op_name="jit(g)/router/convert"}
  %call.2 = (f32[32,8], s8[4]) custom-call(%a), custom_call_target="__cublas$lt$matmul$f8", metadata={op_name="jit(g)/experts/dot"}
  %call.3 = (f32[32,8], s8[4]) custom-call(%b), custom_call_target="__cublas$lt$matmul$f8", metadata={op_name="jit(g)/shared/dot"}
"""  # noqa: E501  # as compilers write


def test_kernels_of_a_library_are_its_calls_in_order():
    """Where there are as many in a run; two runs here, and a third with a kernel too many."""
    names = ["cast_1", "nvjet", "memcpy32_post", "nvjet"] * 2
    names += ["cast_1", "nvjet", "nvjet", "splitKreduce"]
    events = [Event(Kernel("g", name, ""), float(at), 1.0) for at, name in enumerate(names)]
    in_order = ["router", "experts", "experts", "shared expert"]
    assert stages_of(events, {"g": traced(CALLS)}) == [*in_order * 2, *["router"] * 4]
    assert stages_of(events[:3], {}) == ["other"] * 3
