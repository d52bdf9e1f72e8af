"""What compression should leave, by the book: lists of tokens, float64, one head at a time.

The model's own step function runs eagerly; its attention is NumPy over Python lists, and the tokens
to keep are found by sorting. Nothing of the pool, of pages or of chunks of fixed shape is in here.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvgrain_jax import Model

PAD_TO = 16


@dataclasses.dataclass
class Token:
    """A cached token of one head."""

    position: int
    k: np.ndarray
    v: np.ndarray
    score: float


# (layer, head, q [C, G, D], positions [C], candidates) -> scores of the candidates
Score = Callable[[int, int, np.ndarray, np.ndarray, Sequence[Token]], np.ndarray]


def key_norm(layer, head, q, positions, candidates):
    return np.array([-np.linalg.norm(token.k) for token in candidates])


def random(seed: int, n_heads: int) -> Score:
    def score(layer, head, q, positions, candidates):
        key = jax.random.fold_in(jax.random.key(seed), layer)
        keys = [jax.random.fold_in(key, token.position) for token in candidates]
        return np.array([jax.random.uniform(key, (n_heads,))[head] for key in keys])

    return score


def snapkv(queries: int, neighbours: int) -> Score:
    def score(layer, head, q, positions, candidates):
        weights = np.zeros(len(candidates))
        for i in range(max(0, len(q) - queries), len(q)):
            seen = [t.position <= positions[i] for t in candidates]
            keys = np.array([t.k for t in candidates])
            logits = q[i] @ keys.T / np.sqrt(q.shape[-1])
            powers = np.where(seen, np.exp(logits), 0.0)
            weights += (powers / powers.sum(axis=1, keepdims=True)).mean(axis=0)
        weights /= min(queries, len(q))
        place = np.array([t.position for t in candidates])
        near = np.abs(place[:, None] - place[None, :]) <= neighbours // 2
        return (near * weights[None, :]).sum(axis=1) / near.sum(axis=1)

    return score


class HeadLists:
    """The cache of one sequence: for each layer and head the tokens that it holds."""

    def __init__(self, model: Model, score: Score):
        self.model = model
        self.score = score
        shape = (model.n_layers, model.n_kv_heads)
        self.tokens: dict[tuple[int, int], list[Token]] = {at: [] for at in np.ndindex(shape)}
        self.n_tokens = 0

    def feed(self, tokens, targets=None, keep_before=0, window=0) -> np.ndarray:
        """Compute tokens at the next positions; each head then keeps its target, or everything.

        Returns:
          The logits behind the last token.
        """
        positions = self.n_tokens + np.arange(len(tokens))
        self.n_tokens += len(tokens)

        def attend(cache, layer, q, k, v):
            padded = q.shape
            q, k, v = (np.asarray(x, np.float64)[: len(tokens)] for x in (q, k, v))
            n_heads = k.shape[1]
            grouped = q.reshape(len(q), n_heads, -1, q.shape[-1])
            out = np.zeros_like(grouped)
            for head in range(n_heads):
                old = self.tokens[layer, head]
                new = [Token(int(p), k[i, head], v[i, head], 0.0) for i, p in enumerate(positions)]
                for i in range(len(positions)):
                    seen = [*old, *new[: i + 1]]
                    logits = grouped[i, head] @ np.array([t.k for t in seen]).T
                    powers = np.exp(logits / np.sqrt(q.shape[-1]))
                    weights = powers / powers.sum(axis=1, keepdims=True)
                    out[i, head] = weights @ np.array([t.v for t in seen])
                both = [*old, *new]
                if targets is not None:
                    scores = self.score(layer, head, grouped[:, head], positions, both)
                    for token, score in zip(both, scores, strict=True):
                        forced = token.position < keep_before
                        forced |= token.position >= self.n_tokens - window
                        token.score = np.inf if forced else score
                    both.sort(key=lambda t: (-t.score, t.position))
                    both = both[: targets[layer, head]]
                self.tokens[layer, head] = both
            whole = np.zeros(padded, np.float32)
            whole[: len(tokens)] = out.reshape(q.shape)
            return jnp.asarray(whole), cache

        # Padded, so that few shapes are compiled.
        given = np.zeros((2, -(-len(tokens) // PAD_TO) * PAD_TO), np.int32)
        given[:, : len(tokens)] = tokens, positions
        logits, _ = self.model.step(
            self.model.params, jnp.asarray(given[0]), jnp.asarray(given[1]), None, attend
        )
        return np.asarray(logits)[len(tokens) - 1]

    def generate(self, logits: np.ndarray, n: int) -> tuple[int, ...]:
        """The next ``n`` most likely tokens; all but the last are fed and kept."""
        said = [int(logits.argmax())]
        while len(said) < n:
            said.append(int(self.feed(said[-1:]).argmax()))
        return tuple(said)

    def positions(self, layer: int, head: int) -> list[int]:
        return sorted(token.position for token in self.tokens[layer, head])
