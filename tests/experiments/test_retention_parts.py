"""Parts of ``retention``: tasks, masks that equal a compressed cache, equal bytes, statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_text_model import byte_tokenizer, load_tiny_text_model

from experiments.retention_methods import METHODS, Case, Spending, keep_tokens
from experiments.retention_model import (
    answer_questions,
    pack_questions,
    read_context,
    score_context,
)
from experiments.retention_statistics import Answer, compare, summarise
from experiments.retention_tasks import TASKS, make_sample, read_text
from kvgrain_jax.budgets import HeadProfile
from kvgrain_jax.errors import ConfigError

SIZE = 700


@pytest.fixture(scope="module")
def text():
    return read_text("prose", "prose", byte_tokenizer())


@pytest.fixture(scope="module")
def model():
    return load_tiny_text_model().model


@pytest.mark.parametrize("task", TASKS)
def test_a_context_has_its_length_and_holds_the_answers(task, text):
    tokenizer = byte_tokenizer()
    sample = make_sample(task, text, tokenizer, tokens=SIZE, seed=0, half="test")
    assert len(sample.context) == SIZE
    context = tokenizer.decode(sample.context)
    for question in sample.questions:
        answer = tokenizer.decode(question.answer)
        assert answer
        assert (answer in context) == (task != "perplexity")


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_makes_the_same_sample_and_another_seed_another(task, text):
    def make(seed):
        return make_sample(task, text, byte_tokenizer(), tokens=SIZE, seed=seed, half="test")

    assert make(3) == make(3)
    assert make(3) != make(4)


def test_halves_of_a_text_share_no_line(text):
    assert len(text.halves["profile"]) + len(text.halves["test"]) > 1000
    contexts = {
        half: make_sample("perplexity", text, byte_tokenizer(), tokens=SIZE, seed=0, half=half)
        for half in ("profile", "test")
    }
    assert contexts["profile"].context != contexts["test"].context


def test_a_chain_of_variables_leads_to_its_number(text):
    tokenizer = byte_tokenizer()
    sample = make_sample("variable_tracking", text, tokenizer, tokens=SIZE, seed=0, half="test")
    context = tokenizer.decode(sample.context)
    for question in sample.questions:
        second, first = tokenizer.decode(question.prompt).strip().split(" = ")[:2]
        first = first.removesuffix(" =")
        assert f"{second} = {first}\n" in context
        assert f"{first} = {tokenizer.decode(question.answer)}\n" in context


def test_a_context_too_short_for_its_facts_is_an_error(text):
    with pytest.raises(ConfigError, match="too short"):
        make_sample("key_value", text, byte_tokenizer(), tokens=100, seed=0, half="test")


def test_a_text_with_few_lines_is_an_error(tmp_path):
    (tmp_path / "short.txt").write_text("one\n\n\ntwo\n")
    with pytest.raises(ConfigError, match="2 lines"):
        read_text("mine", str(tmp_path / "short.txt"), byte_tokenizer())


def test_masked_tokens_are_as_good_as_gone(model):
    """The answers from a cache of the kept keys alone, at their old positions, by a plain loop."""
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 256, 40), jnp.int32)
    context = read_context(model, tokens)
    keep = rng.random((1, model.n_layers, model.n_kv_heads, 40)) < 0.4
    prompt, answer = (5, 6, 7), (8, 9)
    logprob, _ = answer_questions(
        model, context, jnp.asarray(keep), pack_questions([(prompt, answer)])
    )

    def attend(cache, layer, q, k, v):
        outs = []
        for head in range(q.shape[1]):
            own = head // (q.shape[1] // k.shape[1])
            kept = np.flatnonzero(keep[0, layer, own])
            keys = np.concatenate([context.k[layer][kept, own], k[:, own]])
            values = np.concatenate([context.v[layer][kept, own], v[:, own]])
            for i in range(q.shape[0]):
                n = len(kept) + i + 1
                powers = np.exp(keys[:n] @ np.asarray(q[i, head]) / np.sqrt(q.shape[-1]))
                outs.append(powers @ values[:n] / powers.sum())
        shaped = np.reshape(outs, (q.shape[1], q.shape[0], -1)).transpose(1, 0, 2)
        return jnp.asarray(shaped, jnp.float32), cache

    fed = jnp.asarray([5, 6, 7, 8], jnp.int32)
    logits, _ = model.step(model.params, fed, 40 + jnp.arange(4), (), attend)
    chances = np.asarray(jax.nn.log_softmax(logits))
    assert logprob[0, 0] == pytest.approx((chances[2, 8] + chances[3, 9]) / 2, abs=1e-4)


def test_questions_on_one_context_do_not_see_each_other(model):
    context = read_context(model, jnp.arange(40, dtype=jnp.int32))
    keep = jnp.ones((1, model.n_layers, model.n_kv_heads, 40), bool)
    questions = [((1, 2, 3), (4, 5)), ((9, 8), (7,)), ((6,), (5, 4))]
    together, _ = answer_questions(model, context, keep, pack_questions(questions))
    alone = [
        answer_questions(model, context, keep, pack_questions([q]))[0][0, 0] for q in questions
    ]
    np.testing.assert_allclose(together[0], alone, rtol=1e-5)


def test_a_question_is_right_where_every_token_is_the_first_choice(model):
    tokens = jnp.arange(40, dtype=jnp.int32)
    context = read_context(model, tokens)
    keep = jnp.ones((1, model.n_layers, model.n_kv_heads, 40), bool)
    chances = [
        answer_questions(model, context, keep, pack_questions([((1, 2), (i,))])) for i in range(512)
    ]
    logprob = np.array([found[0][0, 0] for found in chances])
    right = np.array([found[1][0, 0] for found in chances])
    assert np.exp(logprob).sum() == pytest.approx(1.0, abs=1e-3)
    np.testing.assert_array_equal(np.flatnonzero(right), [logprob.argmax()])


def test_kvzip_without_a_repetition_is_an_error(model):
    context = read_context(model, jnp.arange(40, dtype=jnp.int32))
    with pytest.raises(ConfigError, match="needs a repetition"):
        score_context(model, context, "kvzip", key=jax.random.key(0))


def make_case(retention):
    rng = np.random.default_rng(0)
    profile = HeadProfile(
        fractions=rng.random((3, 3, 4)),
        scorer="kvzip",
        checkpoint="tiny",
        target=retention,
        sinks=4,
        window=12,
        lengths=np.full(3, 320),
        domains=("a", "b", "b"),
    )
    return Case(
        scores=jnp.asarray(rng.random((3, 4, 320)), jnp.float32),
        random=jnp.asarray(rng.random((3, 4, 320)), jnp.float32),
        retention=retention,
        own=profile.of_domain("b"),
        other=profile.of_domain("a"),
        spending=Spending(page_size=16, group_size=4, sinks=4, window=12),
    )


@pytest.mark.parametrize("retention", [0.75, 0.35, 0.1])
@pytest.mark.parametrize("method", METHODS)
def test_all_methods_fill_the_same_pages_to_the_last_row(method, retention):
    keep = np.asarray(keep_tokens(method, make_case(retention)))
    kept = keep.sum(axis=-1)
    assert kept.sum() == 12 * 16 * round(retention * 320 / 16)
    assert np.all(kept % 16 == 0)
    assert keep[..., :4].all()
    assert keep[..., -12:].all()


def test_protection_alone_keeps_the_newest_tokens():
    keep = np.asarray(keep_tokens("protected", make_case(0.25)))
    expected = np.zeros(320, bool)
    expected[:4] = expected[-76:] = True
    np.testing.assert_array_equal(keep, np.broadcast_to(expected, keep.shape))


def test_permuted_budgets_are_the_static_ones_on_other_heads():
    static, permuted = (
        np.asarray(keep_tokens(m, make_case(0.35))).sum(axis=-1) for m in ("static", "permuted")
    )
    np.testing.assert_array_equal(np.sort(static.ravel()), np.sort(permuted.ravel()))
    assert np.any(static != permuted)


def test_fewer_pages_than_are_protected_are_an_error():
    with pytest.raises(ConfigError, match="2 are protected"):
        Spending(16, 1, sinks=4, window=28).pages_per_group(320, 0.05)


def answer(method, seed, accuracy, task="key_value", domain="prose", retention=0.5):
    return Answer(task, domain, seed, method, retention, accuracy, 1 - accuracy, questions=4)


def with_full(answers, accuracy=1.0):
    contexts = {(a.task, a.domain, a.seed) for a in answers}
    return [
        *answers,
        *(answer("full", s, accuracy, task, domain, 1.0) for task, domain, s in contexts),
    ]


def summary_of(answers, method="static"):
    return [row for row in summarise(with_full(answers)) if row["method"] == method]


def test_added_nll_is_that_above_the_full_cache_of_the_same_context():
    # nll is 1 - accuracy here: 0.4 and 0.6 against 0.3.
    answers = with_full([answer("static", 0, 0.6), answer("static", 1, 0.4)], accuracy=0.7)
    row = next(row for row in summarise(answers) if row["method"] == "static")
    assert row["nll_added"] == pytest.approx(0.2)


def test_a_mean_gives_every_task_and_domain_the_same_weight():
    answers = [answer("static", s, 1.0) for s in range(3)]
    answers += [answer("static", 0, 0.0, domain="code")]
    cells = {(row["task"], row["domain"]): row for row in summary_of(answers)}
    assert cells["retrieval", "all"]["accuracy"] == 0.5
    assert cells["retrieval", "prose"]["accuracy"] == 1.0
    assert cells["key_value", "all"]["contexts"] == 4
    assert cells["key_value", "all"]["questions"] == 16


def test_an_interval_is_about_two_standard_errors_each_way():
    rng = np.random.default_rng(0)
    values = rng.normal(0.5, 0.1, size=100)
    row = summary_of([answer("static", s, float(v)) for s, v in enumerate(values)])[0]
    half = 1.96 * values.std() / 10
    assert row["accuracy_low"] == pytest.approx(values.mean() - half, abs=0.005)
    assert row["accuracy_high"] == pytest.approx(values.mean() + half, abs=0.005)


def test_perplexity_does_not_count_as_retrieval():
    rows = summary_of([answer("static", 0, 0.0, task="perplexity")])
    assert {row["task"] for row in rows} == {"perplexity"}


def test_differences_are_between_the_same_contexts():
    base = np.random.default_rng(0).random(20) * 0.5
    answers = [answer("uniform", s, float(v)) for s, v in enumerate(base)]
    answers += [answer("static", s, float(v) + 0.25) for s, v in enumerate(base)]
    answers += [answer("static", 99, 0.0)]  # has no partner
    rows = [row for row in compare(answers, [("static", "uniform")]) if row["task"] == "retrieval"]
    assert len(rows) == 1
    for end in ("", "_low", "_high"):
        assert rows[0]["accuracy" + end] == pytest.approx(0.25)
        assert rows[0]["nll" + end] == pytest.approx(-0.25)


def test_full_retention_is_no_comparison():
    answers = [answer(m, 0, 1.0, retention=1.0) for m in ("static", "uniform")]
    assert compare(answers, [("static", "uniform")]) == []
