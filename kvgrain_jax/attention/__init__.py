"""Attention over the pools: partial results, the decode plan, backends, dispatch, prefill."""

from kvgrain_jax.attention.costs import CostTable as CostTable
from kvgrain_jax.attention.costs import Surface as Surface
from kvgrain_jax.attention.costs import load_costs as load_costs
from kvgrain_jax.attention.costs import write_costs as write_costs
from kvgrain_jax.attention.decode import BACKENDS as BACKENDS
from kvgrain_jax.attention.decode import decode_attention as decode_attention
from kvgrain_jax.attention.decode import page_slots as page_slots
from kvgrain_jax.attention.decode import row_order as row_order
from kvgrain_jax.attention.dispatch import Choices as Choices
from kvgrain_jax.attention.dispatch import DispatchRule as DispatchRule
from kvgrain_jax.attention.dispatch import Occupancy as Occupancy
from kvgrain_jax.attention.dispatch import make_choices as make_choices
from kvgrain_jax.attention.dispatch import make_rule as make_rule
from kvgrain_jax.attention.partial import AttentionPartial as AttentionPartial
from kvgrain_jax.attention.partial import merge as merge
from kvgrain_jax.attention.plan import DecodePlan as DecodePlan
from kvgrain_jax.attention.plan import HotPiece as HotPiece
from kvgrain_jax.attention.plan import KernelShape as KernelShape
from kvgrain_jax.attention.plan import Segment as Segment
from kvgrain_jax.attention.plan import find_segments as find_segments
from kvgrain_jax.attention.plan import kernel_shape as kernel_shape
from kvgrain_jax.attention.plan import make_plan as make_plan
from kvgrain_jax.attention.prefill import ChunkPart as ChunkPart
from kvgrain_jax.attention.prefill import PrefillPlan as PrefillPlan
from kvgrain_jax.attention.prefill import make_prefill_plan as make_prefill_plan
from kvgrain_jax.attention.prefill import prefill_attention as prefill_attention
