"""KV append in XLA: the specification, one scatter for the keys and one for the values."""


def append_kv(k, v, new_k, new_v, slots):  # [N, K, D] ×2, [B, K, D] ×2, [B]
    """See ``api.append_kv``."""
    return (
        k.at[slots].set(new_k.astype(k.dtype), mode="drop"),
        v.at[slots].set(new_v.astype(v.dtype), mode="drop"),
    )
