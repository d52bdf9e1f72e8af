"""Head profiles: fractions from counts, files, and how stable a ranking is."""

import dataclasses

import numpy as np
import pytest

from kvgrain_jax.budgets import (
    HeadProfile,
    check_profile,
    load_profile,
    retained_fractions,
    save_profile,
)
from kvgrain_jax.budgets.profile import spearman, split_half_stability
from kvgrain_jax.errors import ConfigError


def make_profile(fractions, **changes):
    fractions = np.asarray(fractions, np.float64)
    n = len(fractions)
    fields = {
        "fractions": fractions,
        "scorer": "kvzip",
        "checkpoint": "tiny-0123",
        "target": 0.25,
        "sinks": 4,
        "window": 12,
        "lengths": np.full(n, 116),
        "domains": ("prose",) * n,
    }
    return HeadProfile(**(fields | changes))


def test_a_fraction_is_of_the_unprotected_tokens():
    kept = np.array([[[16, 66, 116]]])
    fractions = retained_fractions(kept, np.array([116]), sinks=4, window=12)
    np.testing.assert_allclose(fractions, [[[0.0, 0.5, 1.0]]])


@pytest.mark.parametrize("kept", [15, 117])
def test_counts_below_the_protected_or_above_the_context_are_errors(kept):
    with pytest.raises(ConfigError, match=f"kept {kept}"):
        retained_fractions(np.array([[[kept]]]), np.array([116]), sinks=4, window=12)


def test_a_context_that_is_all_protected_is_an_error():
    with pytest.raises(ConfigError, match="not longer than the 16 protected"):
        retained_fractions(np.array([[[16]]]), np.array([16]), sinks=4, window=12)


def test_mean_and_std_are_over_samples():
    profile = make_profile([[[0.2, 0.5]], [[0.4, 0.5]]])
    np.testing.assert_allclose(profile.mean, [[0.3, 0.5]])
    np.testing.assert_allclose(profile.std, [[0.1 * 2**0.5, 0.0]])


def test_one_sample_has_no_spread():
    np.testing.assert_array_equal(make_profile([[[0.2, 0.5]]]).std, [[0.0, 0.0]])


def test_a_saved_profile_comes_back_whole(tmp_path):
    saved = make_profile([[[0.2, 0.5]], [[0.4, 0.5]]], domains=("prose", "code"))
    save_profile(saved, tmp_path / "p.npz")
    loaded = load_profile(tmp_path / "p.npz")
    for field in dataclasses.fields(HeadProfile):
        np.testing.assert_array_equal(getattr(loaded, field.name), getattr(saved, field.name))


def test_a_file_cut_short_is_an_error(tmp_path):
    save_profile(make_profile([[[0.2, 0.5]]]), tmp_path / "p.npz")
    whole = (tmp_path / "p.npz").read_bytes()
    (tmp_path / "p.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"p\.npz cannot be read"):
        load_profile(tmp_path / "p.npz")


def test_another_npz_is_an_error(tmp_path):
    np.savez(tmp_path / "other.npz", raw_ratio=np.zeros(3))
    with pytest.raises(ConfigError, match="no head profile"):
        load_profile(tmp_path / "other.npz")


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_profile(tmp_path / "none.npz")


def test_a_profile_fits_its_own_model():
    check_profile(make_profile([[[0.2, 0.5]]]), checkpoint="tiny-0123", n_layers=1, n_kv_heads=2)


def test_a_profile_of_other_weights_is_an_error():
    with pytest.raises(ConfigError, match="'tiny-0123', the model is 'tiny-4567'"):
        check_profile(
            make_profile([[[0.2, 0.5]]]), checkpoint="tiny-4567", n_layers=1, n_kv_heads=2
        )


def test_a_profile_of_another_shape_is_an_error():
    with pytest.raises(ConfigError, match="1 layers of 2 KV heads, the model has 2 of 1"):
        check_profile(
            make_profile([[[0.2, 0.5]]]), checkpoint="tiny-0123", n_layers=2, n_kv_heads=1
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": 0.0}, "target is 0.0"),
        ({"target": 1.5}, "target is 1.5"),
        ({"sinks": -1}, "sinks is -1"),
        ({"domains": ()}, "1 samples and 0 domains"),
    ],
)
def test_fields_that_cannot_be_are_errors(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_profile([[[0.2, 0.5]]], **changes)


@pytest.mark.parametrize("fraction", [np.nan, -0.1, 1.1])
def test_fractions_that_cannot_be_are_errors(fraction):
    with pytest.raises(ConfigError, match="NaN or outside"):
        make_profile([[[0.2, fraction]]])


def test_a_domain_has_its_own_samples():
    profile = make_profile([[[0.2]], [[0.4]], [[0.6]]], domains=("a", "b", "a"))
    np.testing.assert_array_equal(profile.of_domain("a").fractions.ravel(), [0.2, 0.6])


def test_a_domain_without_samples_is_an_error():
    with pytest.raises(ConfigError, match="no sample of domain 'code'; it has prose"):
        make_profile([[[0.2]]]).of_domain("code")


def test_spearman_of_a_monotone_map_is_one():
    a = np.array([3.0, 1.0, 2.0, 5.0])
    assert spearman(a, np.exp(a)) == pytest.approx(1.0)
    assert spearman(a, -(a**3)) == pytest.approx(-1.0)


def test_spearman_gives_ties_their_mean_rank():
    # Ranks (1.5, 1.5, 3) and (1, 2, 3): covariance 1.5, variances 1.5 and 2.
    assert spearman(np.array([0.0, 0.0, 1.0]), np.array([1.0, 2.0, 3.0])) == pytest.approx(
        1.5 / (1.5 * 2.0) ** 0.5
    )


def test_spearman_of_a_constant_is_nan():
    assert np.isnan(spearman(np.ones(3), np.arange(3.0)))


def test_equal_samples_are_perfectly_stable():
    one = np.random.default_rng(0).random((1, 3, 4))
    halves = split_half_stability(make_profile(np.repeat(one, 4, axis=0)), splits=5)
    np.testing.assert_allclose(halves, 1.0)


def test_unrelated_samples_are_not_stable():
    noise = np.random.default_rng(0).random((10, 20, 20))
    assert abs(split_half_stability(make_profile(noise), splits=20).mean()) < 0.1


def test_halves_of_one_sample_are_an_error():
    with pytest.raises(ConfigError, match="at least two"):
        split_half_stability(make_profile([[[0.2]]]))
