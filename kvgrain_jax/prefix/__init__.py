"""The prefix index and its coupling to the pools: matching, admission, eviction."""

from kvgrain_jax.prefix.cache import PrefixCache as PrefixCache
from kvgrain_jax.prefix.node import Cold as Cold
from kvgrain_jax.prefix.node import Hot as Hot
from kvgrain_jax.prefix.node import Node as Node
from kvgrain_jax.prefix.radix import Match as Match
from kvgrain_jax.prefix.radix import RadixIndex as RadixIndex
from kvgrain_jax.prefix.reservation import Reservation as Reservation
