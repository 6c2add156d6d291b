"""Stages of kernels: from their own names, from their scopes, or from what they read."""

import pytest

from bench.stages import Kernel, scopes_of, stage_of

TEXT = """
HloModule jit_group

%fused_gather (p: f8e4m3fn[16,64]) -> f8e4m3fn[32,64] {
  %p = f8e4m3fn[16,64]{1,0} parameter(0)
  ROOT %gather.1 = f8e4m3fn[32,64]{1,0} gather(%p), metadata={op_name="jit(g)/experts/gather"}
}

ENTRY %main (weights.1: f8e4m3fn[8,64]) -> bf16[32,8] {
  %weights.1 = f8e4m3fn[8,64]{1,0} parameter(0), metadata={op_name="weights"}
  %rows.2 = f8e4m3fn[32,64]{1,0} fusion(%weights.1), metadata={op_name="jit(g)/experts/gather"}
  %bitcast.4 = f8e4m3fn[32,64]{1,0} bitcast(%rows.2)
  %custom-call.5.0 = (bf16[32,8]{1,0}, s8[64]{0}) custom-call(%weights.1, %bitcast.4), target="lt"
  %lost.6 = s32[] constant(0)
  ROOT %sum.7 = bf16[32,8] fusion(%custom-call.5.0, %rows.2), metadata={op_name="jit(g)/combine"}
}
"""


@pytest.mark.parametrize(
    ("name", "instruction", "stage"),
    [
        ("rows_2", "rows_2", "experts"),
        ("nvjet_sm90_qqtst", "custom_call_5_0", "experts"),  # from its second operand's operand
        ("sum_7", "", "attention weights"),  # its own, and not that of what it reads
        ("index_scores_kernel", "", "index"),
        ("lost_6", "lost_6", "other"),
        ("nobody_knows", "nobody_knows", "other"),
    ],
)
def test_stage_of(name, instruction, stage):
    assert stage_of(Kernel("group", name, instruction), scopes_of(TEXT)) == stage
