"""Per-head budgets: scores, head profiles, deterministic budgets, head groups, split tables."""

from kvgrain_jax.budgets.budget import BudgetPlan as BudgetPlan
from kvgrain_jax.budgets.budget import check_budgets as check_budgets
from kvgrain_jax.budgets.budget import plan_budgets as plan_budgets
from kvgrain_jax.budgets.budget import tokens_per_head as tokens_per_head
from kvgrain_jax.budgets.budget import uniform_plan as uniform_plan
from kvgrain_jax.budgets.groups import Footprint as Footprint
from kvgrain_jax.budgets.groups import HeadGroups as HeadGroups
from kvgrain_jax.budgets.groups import fill_pages as fill_pages
from kvgrain_jax.budgets.groups import footprint as footprint
from kvgrain_jax.budgets.groups import group_pages as group_pages
from kvgrain_jax.budgets.groups import make_groups as make_groups
from kvgrain_jax.budgets.partition import SplitTable as SplitTable
from kvgrain_jax.budgets.partition import even_partition as even_partition
from kvgrain_jax.budgets.partition import partition as partition
from kvgrain_jax.budgets.profile import HeadProfile as HeadProfile
from kvgrain_jax.budgets.profile import check_profile as check_profile
from kvgrain_jax.budgets.profile import load_profile as load_profile
from kvgrain_jax.budgets.profile import retained_fractions as retained_fractions
from kvgrain_jax.budgets.profile import save_profile as save_profile
