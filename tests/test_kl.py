"""KL estimators against closed forms and plain loops, their exact expected gradients, and the controller as a feedback loop."""
import itertools
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from rookworld_nb.kl import (EXACT_KL, KL_ESTIMATORS, SAMPLED_KL, BatchShapeError, KLConfig, KLController, SettingError,
                             check_count, exact_kl, per_token_kl, reweight_kl)

EXACT = dict(atol=1e-9, rtol=1e-9)
SEEDS = st.integers(0, 2**31 - 1)


def rng(seed): return torch.Generator().manual_seed(seed)


def distribution(seed, vocab, spread=1.0):
    "A random distribution over `vocab` tokens as fp64 probabilities."
    return (spread * torch.randn(vocab, generator=rng(seed), dtype=torch.float64)).softmax(-1)


def forward_gradient(p, q):
    "Gradient of KL(p || q) in the logits of p, closed form: p (d - KL)."
    d = (p / q).log()
    return p * (d - (p * d).sum())


def reverse_gradient(p, q):
    "Gradient of KL(q || p) in the logits of p, closed form: p - q."
    return p - q


# ---------------------------------------------------------------- values

def one_kl(logprob, ref_logprob, estimator):
    "One token's estimate in plain Python."
    d = logprob - ref_logprob
    return {'kl1': d, 'kl2': d * d / 2, 'kl3': math.exp(-d) - 1 + d}[estimator]


@pytest.mark.parametrize('estimator', SAMPLED_KL)
@settings(max_examples=30)
@given(seed=SEEDS, rows=st.integers(1, 4), columns=st.integers(1, 6))
def test_estimators_equal_a_plain_loop(estimator, seed, rows, columns):
    logprobs, ref = -3 * torch.rand(2, rows, columns, generator=rng(seed), dtype=torch.float64)
    expected = [[one_kl(a, b, estimator) for a, b in zip(*pair)] for pair in zip(logprobs.tolist(), ref.tolist())]
    assert_close(per_token_kl(logprobs, ref, estimator), torch.tensor(expected, dtype=torch.float64), **EXACT)


def exact_by_loop(policy, reference, direction):
    "KL of one token from two lists of logits, in plain Python."
    def normalise(logits):
        total = sum(math.exp(value) for value in logits)
        return [math.exp(value) / total for value in logits]
    p, q = normalise(policy), normalise(reference)
    forward = sum(a * math.log(a / b) for a, b in zip(p, q))
    reverse = sum(b * math.log(b / a) for a, b in zip(p, q))
    return {'forward': forward, 'reverse': reverse, 'symmetric': (forward + reverse) / 2}[direction]


@pytest.mark.parametrize('direction', EXACT_KL)
@settings(max_examples=20)
@given(seed=SEEDS, rows=st.integers(1, 3), columns=st.integers(1, 4), vocab=st.integers(2, 7))
def test_exact_kl_equals_a_plain_loop(direction, seed, rows, columns, vocab):
    policy, ref = 2 * torch.randn(2, rows, columns, vocab, generator=rng(seed), dtype=torch.float64)
    expected = [[exact_by_loop(policy[i, j].tolist(), ref[i, j].tolist(), direction) for j in range(columns)] for i in range(rows)]
    assert_close(exact_kl(policy, ref, direction), torch.tensor(expected, dtype=torch.float64), **EXACT)


@pytest.mark.parametrize('other', [(2, 1), (1, 3), (3, 2), (3,)])
def test_shapes_that_would_be_stretched_are_refused(other):
    with pytest.raises(BatchShapeError, match=rf'ref_logprobs has shape \({re.escape(str(other)[1:-1])}\), logprobs \(2, 3\)'):
        per_token_kl(torch.zeros(2, 3), torch.zeros(other))
    with pytest.raises(BatchShapeError, match='ref_logits'): exact_kl(torch.zeros(2, 3, 5), torch.zeros(*other, 5))


@pytest.mark.parametrize('value', [0, -1, 2.5, 2., True, '2', None])
def test_a_count_is_a_whole_number(value):
    with pytest.raises(SettingError, match='size=.* must be a whole number of at least 1'): check_count('size', value)
    check_count('size', 0, 0)


def test_coins_in_closed_form():
    heads = torch.tensor([[[.75, .25]]], dtype=torch.float64).log()
    fair = torch.zeros(1, 1, 2, dtype=torch.float64)
    assert exact_kl(heads, fair, 'forward').item() == pytest.approx(math.log(2) + .75 * math.log(.75) + .25 * math.log(.25), abs=1e-12)
    assert exact_kl(heads, fair, 'reverse').item() == pytest.approx(-.5 * math.log(.75) - .5 * math.log(.25) - math.log(2), abs=1e-12)


@pytest.mark.parametrize('estimator', SAMPLED_KL)
def test_equal_policies_are_exactly_zero_apart(estimator):
    logprobs = -5 * torch.rand(8, 32, generator=rng(0))
    assert not per_token_kl(logprobs, logprobs.clone(), estimator).any()


@settings(max_examples=50)
@given(seed=SEEDS, exponent=st.floats(-7, 1))
def test_kl2_and_kl3_are_never_negative_in_single_precision(seed, exponent):
    logprobs = -3 * torch.rand(256, generator=rng(seed))
    ref = logprobs + 10**exponent * torch.randn(256, generator=rng(seed + 1))
    for estimator in ('kl2', 'kl3'): assert per_token_kl(logprobs, ref, estimator).min() >= 0


def test_kl3_keeps_its_digits_near_zero():
    d = torch.tensor([1e-5, 1e-4, 1e-3])
    assert_close(per_token_kl(d, torch.zeros(3)), d.square() / 2, rtol=1e-2, atol=0)


def test_half_precision_logits_are_summed_in_single_precision():
    logits, ref = torch.randn(2, 1, 5, 1000, generator=rng(3)).bfloat16()
    result = exact_kl(logits, ref)
    assert result.dtype == torch.float32
    assert_close(result, exact_kl(logits.double(), ref.double()).float(), rtol=1e-4, atol=1e-5)


def test_forbidden_tokens_give_finite_values_and_gradients():
    logits = torch.tensor([[[0., 1., -torch.inf]]], requires_grad=True)
    result = exact_kl(logits, torch.tensor([[[0., 0., 0.]]]))
    result.sum().backward()
    assert torch.isfinite(result).all() and torch.isfinite(logits.grad).all()


def test_kl1_and_kl3_have_the_exact_mean_over_whole_sequences():
    # two tokens, the second depends on the first: the per-token estimates of a sequence add up to the KL of the sequence
    first, ref_first = distribution(1, 3), distribution(2, 3)
    second, ref_second = (torch.stack([distribution(seed + i, 3) for i in range(3)]) for seed in (10, 20))
    joint, ref_joint = first[:, None] * second, ref_first[:, None] * ref_second
    truth = (joint * (joint / ref_joint).log()).sum()
    for estimator in ('kl1', 'kl3'):
        mean = sum(joint[i, j] * (per_token_kl(first[i].log(), ref_first[i].log(), estimator)
                                  + per_token_kl(second[i, j].log(), ref_second[i, j].log(), estimator))
                   for i, j in itertools.product(range(3), repeat=2))
        assert_close(mean, truth, **EXACT)


# ---------------------------------------------------------------- gradients

@pytest.mark.parametrize('direction, expected', [
    ('forward', forward_gradient), ('reverse', reverse_gradient),
    ('symmetric', lambda p, q: (forward_gradient(p, q) + reverse_gradient(p, q)) / 2)])
@settings(max_examples=15)
@given(seed=SEEDS, vocab=st.integers(2, 8))
def test_exact_kl_has_the_closed_form_gradient(direction, expected, seed, vocab):
    p, q = distribution(seed, vocab), distribution(seed + 1, vocab)
    logits = p.log().view(1, 1, -1).requires_grad_()
    exact_kl(logits, q.log().view(1, 1, -1), direction).sum().backward()
    assert_close(logits.grad.flatten(), expected(p, q), **EXACT)


def expected_gradient(p, q, old, estimator, reweighted):
    "Mean gradient in the logits of p of the estimate, tokens enumerated under `old`."
    logits = p.log().requires_grad_()
    logprobs = logits.log_softmax(-1)
    kl = per_token_kl(logprobs, q.log(), estimator)
    if reweighted: kl = reweight_kl(kl, (logprobs - old.log()).exp(), estimator)
    (old * kl).sum().backward()
    return logits.grad


@settings(max_examples=25)
@given(seed=SEEDS, vocab=st.integers(2, 8))
def test_plain_estimators_on_policy(seed, vocab):
    p, q = distribution(seed, vocab), distribution(seed + 1, vocab)
    assert_close(expected_gradient(p, q, p, 'kl1', False), torch.zeros(vocab, dtype=torch.float64), **EXACT)
    assert_close(expected_gradient(p, q, p, 'kl2', False), forward_gradient(p, q), **EXACT)
    assert_close(expected_gradient(p, q, p, 'kl3', False), reverse_gradient(p, q), **EXACT)


@pytest.mark.parametrize('estimator', SAMPLED_KL)
@settings(max_examples=25)
@given(seed=SEEDS, vocab=st.integers(2, 8))
def test_reweighted_estimators_have_the_forward_gradient_off_policy_too(estimator, seed, vocab):
    p, q, old = (distribution(seed + i, vocab) for i in range(3))
    assert_close(expected_gradient(p, q, old, estimator, True), forward_gradient(p, q), **EXACT)
    assert_close(expected_gradient(p, q, p, estimator, True), forward_gradient(p, q), **EXACT)


@pytest.mark.parametrize('estimator', EXACT_KL)
def test_an_exact_kl_is_not_reweighted(estimator):
    kl = torch.rand(2, 3)
    assert reweight_kl(kl, torch.full((2, 3), 2.0), estimator) is kl


def test_reweighting_broadcasts_one_ratio_per_sequence():
    kl, ratio = torch.rand(2, 3), torch.tensor([[2.0], [0.5]])
    assert_close(reweight_kl(kl, ratio, 'kl3'), kl * ratio)


# ---------------------------------------------------------------- names

@pytest.mark.parametrize('call, setting, valid', [
    (lambda x: per_token_kl(torch.zeros(1, 1), torch.zeros(1, 1), x), 'kl_estimator', SAMPLED_KL),
    (lambda x: exact_kl(torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), x), 'direction', EXACT_KL),
    (lambda x: reweight_kl(torch.zeros(1, 1), torch.ones(1, 1), x), 'kl_estimator', KL_ESTIMATORS),
    (lambda x: KLConfig(kl_control=x), 'kl_control', ('fixed', 'adaptive'))])
def test_a_wrong_word_is_named_with_the_valid_ones(call, setting, valid):
    with pytest.raises(SettingError) as error: call('k4')
    for word in (setting, "'k4'", *valid): assert word in str(error.value)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize('setting, value', [
    ('kl_coef', -.1), ('kl_coef', math.nan), ('kl_coef', math.inf), ('kl_target', 0.), ('kl_warmup_steps', -1), ('kl_warmup_steps', 2.5),
    ('kl_warmup_factor', 1.5), ('kl_coef_min', 0.), ('kl_coef_min', 2.)])
def test_a_number_out_of_range_is_named(setting, value):
    with pytest.raises(SettingError, match=f'{setting}={value}'): KLConfig(**{setting: value})


def test_an_adaptive_start_must_lie_inside_its_bounds():
    with pytest.raises(SettingError, match='kl_coef=5.0'): KLConfig(kl_coef=5., kl_control='adaptive')
    assert KLConfig(kl_coef=5.).kl_coef == 5.  # fixed: bounds do not apply


# ---------------------------------------------------------------- control

@pytest.mark.parametrize('kl, factor', [(.0751, 1.5), (.0749, 1), (.05, 1), (.0334, 1), (.0333, 1 / 1.5), (9., 1.5), (0., 1 / 1.5),
                                        (math.inf, 1.5), (math.nan, 1)])
def test_one_correction(kl, factor):
    controller = KLController(KLConfig(kl_coef=.02, kl_control='adaptive', kl_target=.05))
    assert controller.update(kl, step=1) == pytest.approx(.02 * factor)
    assert controller.coefficient(2) == pytest.approx(.02 * factor)


@settings(max_examples=40)
@given(kls=st.lists(st.floats(0, 100), max_size=60))
def test_bounds_hold_whatever_is_measured(kls):
    controller = KLController(KLConfig(kl_coef=.02, kl_control='adaptive', kl_coef_min=.01, kl_coef_max=.1))
    for step, kl in enumerate(kls, 1): assert .01 <= controller.update(kl, step) <= .1


@pytest.mark.parametrize('kl, bound', [(0., .01), (9., .1)])
def test_a_coefficient_stops_at_its_bound_and_a_checkpoint_from_there_is_fine(kl, bound):
    config = KLConfig(kl_coef=.02, kl_control='adaptive', kl_coef_min=.01, kl_coef_max=.1)
    controller, resumed = KLController(config), KLController(config)
    for step in range(1, 9): controller.update(kl, step)
    resumed.load_state_dict(controller.state_dict())
    assert controller.kl_coef == resumed.kl_coef == bound


@settings(max_examples=30)
@given(kls=st.lists(st.floats(0, 100), max_size=20))
def test_fixed_stays_fixed(kls):
    controller = KLController(KLConfig(kl_coef=.02))
    for step, kl in enumerate(kls, 1): controller.update(kl, step)
    assert controller.coefficient(len(kls) + 1) == .02


def test_warm_up_multiplies_and_is_never_stored():
    config = KLConfig(kl_coef=.02, kl_control='adaptive', kl_warmup_steps=3, kl_warmup_factor=.1)
    controller = KLController(config)
    for step in (1, 2, 3):
        assert controller.coefficient(step) == pytest.approx(.002)
        controller.update(50., step)
        assert controller.state_dict() == {'kl_coef': .02}
    assert controller.coefficient(4) == .02
    resumed = KLController(config)  # a checkpoint from the middle of the warm-up loses nothing
    resumed.load_state_dict(controller.state_dict())
    assert resumed.coefficient(4) == .02 and resumed.coefficient(3) == pytest.approx(.002)


def test_the_state_carries_a_moved_coefficient():
    config = KLConfig(kl_coef=.02, kl_control='adaptive')
    controller, resumed = KLController(config), KLController(config)
    for step in range(1, 4): controller.update(1., step)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.coefficient(4) == controller.coefficient(4) == pytest.approx(.02 * 1.5**3)


@pytest.mark.parametrize('value', [0., 5., -1., math.nan])
def test_a_state_from_which_the_control_cannot_move_is_refused(value):
    controller = KLController(KLConfig(kl_coef=.02, kl_control='adaptive'))
    with pytest.raises(SettingError, match='kl_coef'): controller.load_state_dict({'kl_coef': value})
    assert controller.state_dict() == {'kl_coef': .02}


@settings(max_examples=60)
@given(start=st.floats(1e-3, 1.), scale=st.floats(.3, 3.), power=st.floats(.5, 1.), target=st.floats(.02, .5))
def test_adaptive_control_reaches_its_band_and_stays(start, scale, power, target):
    # a policy whose KL falls with the coefficient as a power law; some coefficient in [0.01, 0.1] gives the target
    config = KLConfig(kl_coef=start, kl_control='adaptive', kl_target=target, kl_coef_min=1e-4, kl_coef_max=10.)
    controller = KLController(config)
    def respond(): return target * scale * (.03 / controller.coefficient(1))**power
    for step in range(1, 60): controller.update(respond(), step)
    assert target / 1.5 <= respond() <= target * 1.5
    settled = controller.kl_coef
    for step in range(60, 80): controller.update(respond(), step)
    assert controller.kl_coef == settled


@pytest.mark.parametrize('name, value', [('kl_coef', 'x'), ('kl_coef', True), ('kl_target', None), ('kl_coef_max', math.inf), ('kl_warmup_factor', math.nan)])
def test_a_setting_that_is_no_number_is_named(name, value):
    with pytest.raises(SettingError, match=f'{name}={value!r} must be'): KLConfig(**{name: value})
