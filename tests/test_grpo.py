"""Advantages, losses and GAE against plain Python loops, exact expectations, and the invariances a loss must have."""
import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from rookworld_nb.credit import gae, place_rewards, value_loss
from rookworld_nb.grpo import (BASELINES, IMPORTANCE_LEVELS, LOSS_TYPES, REWARD_SCALES, EMATracker,
                               MissingInputError, adaptive_baseline, by_group, compute_advantages, count_items, grpo_loss,
                               importance_ratio, policy_term)
from rookworld_nb.kl import EXACT_KL, SAMPLED_KL, BatchShapeError, SettingError, exact_kl, per_token_kl, reweight_kl

EXACT = dict(atol=1e-9, rtol=1e-9)
SEEDS = st.integers(0, 2**31 - 1)
LENGTH = 9  # max_completion_length in the tests of dr_grpo


def rng(seed): return torch.Generator().manual_seed(seed)


def fp64(values): return torch.tensor(values, dtype=torch.float64)


def make_batch(seed, rows=4, columns=5, spread=.4):
    "A random batch (fp64): log-probabilities under three policies, advantages, and masks of varied length."
    logprobs = -3 * torch.rand(rows, columns, generator=rng(seed), dtype=torch.float64)
    old, ref = (logprobs + spread * torch.randn(rows, columns, generator=rng(seed + i), dtype=torch.float64) for i in (1, 2))
    advantages = torch.randn(rows, generator=rng(seed + 3), dtype=torch.float64)
    lengths = torch.randint(1, columns + 1, (rows, 1), generator=rng(seed + 4))
    return dict(logprobs=logprobs, old_logprobs=old, ref_logprobs=ref, advantages=advantages,
                completion_mask=torch.arange(columns) < lengths)


# ---------------------------------------------------------------- the loss in plain Python

def loop_loss(batch, clip_low, clip_high, kl_coef, estimator, unbiased, loss_type, level):
    "Loss, its gradient in the log-probabilities, and the metrics, with nothing but loops and math."
    lp, old, ref, A, m = (batch[name].tolist() for name in ('logprobs', 'old_logprobs', 'ref_logprobs', 'advantages', 'completion_mask'))
    active = [[t for t, on in enumerate(row) if on] for row in m]
    total = sum(map(len, active))
    loss, gradient, kls, flags, ratios = 0.0, [[0.0] * len(row) for row in lp], [], [], []
    for i, tokens in enumerate(active):
        weight = {'grpo': 1 / (len(active) * len(tokens)), 'bnpo': 1 / total, 'dapo': 1 / total,
                  'dr_grpo': 1 / (len(active) * LENGTH)}[loss_type]
        mean_ratio = math.exp(sum(lp[i][t] - old[i][t] for t in tokens) / len(tokens))
        through_ratio = 0.0  # derivative of the row's loss in the shared log-ratio, sequence level only
        for t in tokens:
            w = math.exp(lp[i][t] - old[i][t]) if level == 'token' else mean_ratio
            low, high = A[i] < 0 and w < 1 - clip_low, A[i] > 0 and w > 1 + clip_high
            policy = -(1 - clip_low) * A[i] if low else -(1 + clip_high) * A[i] if high else -w * A[i]
            by_log_ratio = 0.0 if low or high else -w * A[i]  # derivative in log w
            d = lp[i][t] - ref[i][t]
            k, dk = {'kl1': (d, 1.0), 'kl2': (d * d / 2, d), 'kl3': (math.exp(-d) - 1 + d, 1 - math.exp(-d))}[estimator]
            if unbiased:
                if estimator != 'kl2': by_log_ratio += kl_coef * w * k
                k, dk = w * k, w * dk
            loss += weight * (policy + kl_coef * k)
            gradient[i][t] += weight * kl_coef * dk
            if level == 'token': gradient[i][t] += weight * by_log_ratio
            else: through_ratio += weight * by_log_ratio
            shown = (math.exp(-d) - 1 + d) * (w if unbiased else 1) if estimator == 'kl1' else k
            kls.append(shown); ratios.append(w)
            if level == 'token' or t == tokens[0]: flags.append((low, high))
        for t in tokens: gradient[i][t] += through_ratio / len(tokens)
    share = [sum(column) / len(flags) for column in zip(*flags)]
    return loss, gradient, {'kl': sum(kls) / total, 'clip_ratio/low_mean': share[0], 'clip_ratio/high_mean': share[1],
                            'clip_ratio/region_mean': sum(share), 'ratio_max': max(ratios)}


GRID = list(itertools.product(LOSS_TYPES, IMPORTANCE_LEVELS, SAMPLED_KL, (True, False), (0.0, 0.3)))


@pytest.mark.parametrize('loss_type, level, estimator, unbiased, kl_coef', GRID)
def test_loss_gradient_and_metrics_equal_plain_loops(loss_type, level, estimator, unbiased, kl_coef):
    for seed in range(4):
        batch = make_batch(100 * seed + 7)
        expected, gradient, expected_metrics = loop_loss(batch, .1, .25, kl_coef, estimator, unbiased, loss_type, level)
        logprobs = batch.pop('logprobs').requires_grad_()
        loss, metrics = grpo_loss(logprobs, **batch, clip_low=.1, clip_high=.25, kl_coef=kl_coef, kl_estimator=estimator,
                                  kl_unbiased=unbiased, loss_type=loss_type, importance_level=level, max_completion_length=LENGTH)
        loss.backward()
        assert loss.shape == () and loss.item() == pytest.approx(expected, abs=1e-9)
        assert_close(logprobs.grad, fp64(gradient), **EXACT)
        for name, value in expected_metrics.items(): assert metrics[name] == pytest.approx(value, abs=1e-9), name
        assert metrics['policy_loss'] + metrics.get('kl_loss', 0.0) == pytest.approx(expected, abs=1e-9)


def test_the_batches_of_the_grid_clip_on_both_sides():
    metrics = [grpo_loss(**make_batch(100 * seed + 7), clip_low=.1, clip_high=.25)[1] for seed in range(4)]
    assert sum(row['clip_ratio/low_mean'] for row in metrics) > 0 and sum(row['clip_ratio/high_mean'] for row in metrics) > 0


def test_percentiles_are_over_active_tokens():
    batch = make_batch(5, rows=6, columns=8)
    _, metrics = grpo_loss(**batch, kl_unbiased=False)
    d = (batch['logprobs'] - batch['ref_logprobs'])[batch['completion_mask']]
    kl = sorted((math.exp(-x) - 1 + x) for x in d.tolist())
    def percentile(share):
        place = share * (len(kl) - 1)
        below = math.floor(place)
        return kl[below] + (place - below) * (kl[min(below + 1, len(kl) - 1)] - kl[below])
    assert metrics['kl_95pct'] == pytest.approx(percentile(.95), abs=1e-9)
    assert metrics['kl_5pct'] == pytest.approx(percentile(.05), abs=1e-9)


@pytest.mark.parametrize('ratio, advantage, slope', [
    (.5, 1, -1), (1.19, 1, -1), (1.21, 1, 0), (.79, -1, 0), (.81, -1, 1), (1.5, -1, 1), (.5, 0, 0), (1.5, 0, 0)])
def test_clipping_stops_the_gradient_only_where_the_update_has_done_its_work(ratio, advantage, slope):
    w = fp64(ratio).requires_grad_()
    policy_term(w, fp64(advantage)).backward()
    assert w.grad.item() == slope


def test_a_ratio_outside_the_range_counts_as_clipped_only_with_the_matching_sign():
    old, mask = torch.zeros(4, 1), torch.ones(4, 1, dtype=torch.bool)
    logprobs = torch.tensor([[.5], [.5], [1.5], [1.5]]).log()
    _, metrics = grpo_loss(logprobs, old, None, torch.tensor([1., -1., 1., -1.]), mask)
    assert [metrics[f'clip_ratio/{name}_mean'] for name in ('low', 'high', 'region')] == [.25, .25, .5]


@pytest.mark.parametrize('level', IMPORTANCE_LEVELS)
def test_the_largest_ratio_is_that_of_an_active_token(level):
    old, mask = torch.zeros(2, 3), torch.tensor([[True, True, False], [False, False, False]])
    _, metrics = grpo_loss(old + math.log(.5), old, None, torch.ones(2), mask, importance_level=level)
    assert metrics['ratio_max'] == pytest.approx(.5)


@pytest.mark.parametrize('direction', EXACT_KL)
@pytest.mark.parametrize('level', IMPORTANCE_LEVELS)
def test_an_exact_kl_enters_the_loss_as_it_is(direction, level):
    batch = make_batch(11)
    logits = torch.randn(4, 5, 6, generator=rng(1), dtype=torch.float64).requires_grad_()
    token_kl = exact_kl(logits, torch.randn(4, 5, 6, generator=rng(2), dtype=torch.float64), direction)
    loss, metrics = grpo_loss(**batch, kl_coef=.5, kl_estimator=direction, token_kl=token_kl, importance_level=level)
    without, _ = grpo_loss(**batch, importance_level=level)
    mean = token_kl[batch['completion_mask']].mean()
    assert_close(loss - without, .5 * mean, **EXACT)
    assert metrics['kl'] == pytest.approx(mean.item(), abs=1e-9)
    assert_close(torch.autograd.grad(loss, logits, retain_graph=True)[0], torch.autograd.grad(.5 * mean, logits)[0], **EXACT)


def test_the_entropy_bonus_is_subtracted_and_shown():
    batch = make_batch(12)
    entropy = torch.rand(4, 5, generator=rng(3), dtype=torch.float64).requires_grad_()
    loss, metrics = grpo_loss(**batch, entropy=entropy, entropy_coef=.01)
    loss.backward()
    mask = batch['completion_mask']
    assert_close(loss.detach(), grpo_loss(**batch)[0] - .01 * entropy.detach()[mask].mean(), **EXACT)
    assert metrics['entropy'] == pytest.approx(entropy[mask].mean().item(), abs=1e-9)
    assert_close(entropy.grad, -.01 * mask.double() / mask.sum(), **EXACT)
    assert 'entropy' not in grpo_loss(**batch)[1]


def test_advantages_may_differ_from_token_to_token():
    batch = make_batch(13)
    spread = batch['advantages'][:, None].expand(4, 5)
    assert_close(grpo_loss(**batch)[0], grpo_loss(**batch | dict(advantages=spread))[0], **EXACT)
    tokens = torch.randn(4, 5, generator=rng(4), dtype=torch.float64)
    loss, _ = grpo_loss(**batch | dict(advantages=tokens, old_logprobs=batch['logprobs']))
    assert_close(loss, -tokens[batch['completion_mask']].mean(), **EXACT)


# ---------------------------------------------------------------- what a loss must not depend on

def gradient_of(batch, **options):
    "Loss and gradient in the log-probabilities."
    logprobs = batch['logprobs'].clone().requires_grad_()
    loss, metrics = grpo_loss(**batch | dict(logprobs=logprobs), **options)
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0], metrics


def some_options(loss_type, level): return dict(loss_type=loss_type, importance_level=level, max_completion_length=LENGTH, kl_coef=.1)


@pytest.mark.parametrize('level', IMPORTANCE_LEVELS)
@pytest.mark.parametrize('loss_type', LOSS_TYPES)
@settings(max_examples=10)
@given(seed=SEEDS, rows=st.integers(1, 6), extra=st.integers(1, 4), data=st.data())
def test_order_and_padding_change_nothing(loss_type, level, seed, rows, extra, data):
    batch, options = make_batch(seed, rows), some_options(loss_type, level)
    loss, gradient, metrics = gradient_of(batch, **options)
    order = torch.tensor(data.draw(st.permutations(range(rows))))
    shuffled_loss, shuffled, shuffled_metrics = gradient_of({name: values[order] for name, values in batch.items()}, **options)
    assert_close(shuffled_loss, loss, **EXACT); assert_close(shuffled, gradient[order], **EXACT)

    def widen(values):  # padding holds the worst there is
        filler = False if values.dtype == torch.bool else data.draw(st.sampled_from([0.0, -100.0, math.nan, -math.inf, math.inf]))
        return values if values.dim() == 1 else torch.cat([values, torch.full((rows, extra), filler, dtype=values.dtype)], 1)
    wide = {name: widen(values) for name, values in batch.items()}
    padded_loss, padded, padded_metrics = gradient_of(wide, **options)
    assert_close(padded_loss, loss, **EXACT); assert_close(padded[:, :5], gradient, **EXACT)
    assert not padded[:, 5:].any()
    for name in metrics:
        assert padded_metrics[name] == pytest.approx(metrics[name], abs=1e-9)
        assert shuffled_metrics[name] == pytest.approx(metrics[name], abs=1e-9)


@pytest.mark.parametrize('level', IMPORTANCE_LEVELS)
@pytest.mark.parametrize('loss_type', LOSS_TYPES)
@settings(max_examples=10)
@given(seed=SEEDS, rows=st.integers(1, 6), data=st.data())
def test_any_cut_into_micro_batches_gives_the_same_gradient(loss_type, level, seed, rows, data):
    batch, options = make_batch(seed, rows), some_options(loss_type, level)
    loss, gradient, _ = gradient_of(batch, **options)
    cuts = sorted(data.draw(st.sets(st.integers(1, rows))) | {rows})
    whole, start, losses, parts = count_items(batch['completion_mask'], loss_type), 0, [], []
    for end in cuts:
        part = gradient_of({name: values[start:end] for name, values in batch.items()}, **options, num_items=whole)
        losses.append(part[0]); parts.append(part[1]); start = end
    assert_close(sum(losses), loss, **EXACT); assert_close(torch.cat(parts), gradient, **EXACT)


@pytest.mark.parametrize('loss_type', LOSS_TYPES)
def test_a_step_without_active_tokens_is_zero_not_nan(loss_type):
    batch = make_batch(1)
    batch['completion_mask'] = torch.zeros_like(batch['completion_mask'])
    loss, gradient, metrics = gradient_of(batch, **some_options(loss_type, 'sequence'))
    assert loss == 0 and not gradient.any() and not any(math.isnan(value) for value in metrics.values())


def test_an_integer_mask_is_as_good_as_a_boolean_one():
    batch = make_batch(2)
    assert_close(grpo_loss(**batch)[0], grpo_loss(**batch | dict(completion_mask=batch['completion_mask'].long()))[0], **EXACT)


@pytest.mark.parametrize('level', IMPORTANCE_LEVELS)
@pytest.mark.parametrize('loss_type', LOSS_TYPES)
@pytest.mark.parametrize('estimator', SAMPLED_KL)
def test_first_update_identity_is_exact_in_single_precision(estimator, loss_type, level):
    batch = {name: values.float() if values.is_floating_point() else values for name, values in make_batch(3, 8, 40).items()}
    batch['ref_logprobs'] = batch['old_logprobs'] = batch['logprobs']
    _, gradient, metrics = gradient_of(batch, **some_options(loss_type, level), kl_estimator=estimator)
    assert metrics['ratio_max'] == 1 and metrics['kl'] == metrics['kl_95pct'] == 0
    assert all(metrics[f'clip_ratio/{name}_mean'] == 0 for name in ('low', 'high', 'region'))
    assert gradient.any()


def test_no_gradient_reaches_the_samplers_the_reference_or_the_advantages():
    batch = make_batch(4)
    leaves = {name: batch[name].clone().requires_grad_() for name in ('logprobs', 'old_logprobs', 'ref_logprobs', 'advantages')}
    loss, _ = grpo_loss(**batch | leaves, kl_coef=.1)
    loss.backward()
    assert leaves.pop('logprobs').grad.any() and all(leaf.grad is None for leaf in leaves.values())


# ---------------------------------------------------------------- what is refused

@pytest.mark.parametrize('setting, valid', [('kl_estimator', SAMPLED_KL + EXACT_KL), ('loss_type', LOSS_TYPES),
                                            ('importance_level', IMPORTANCE_LEVELS)])
def test_a_wrong_word_in_the_loss_is_named(setting, valid):
    with pytest.raises(SettingError) as error: grpo_loss(**make_batch(1), **{setting: 'nonsense'})
    for word in (setting, "'nonsense'", *valid): assert word in str(error.value)


@pytest.mark.parametrize('setting, valid', [('baseline', BASELINES), ('scale_rewards', REWARD_SCALES)])
def test_a_wrong_word_in_the_advantages_is_named(setting, valid):
    with pytest.raises(SettingError) as error: compute_advantages(torch.ones(4), 2, **{setting: 'nonsense'})
    for word in (setting, "'nonsense'", *valid): assert word in str(error.value)


def test_missing_inputs_are_named():
    batch = make_batch(1)
    without_reference = batch | dict(ref_logprobs=None)
    assert 'kl' not in grpo_loss(**without_reference)[1]
    with pytest.raises(MissingInputError, match='kl_coef=0.1 needs ref_logprobs'): grpo_loss(**without_reference, kl_coef=.1)
    with pytest.raises(MissingInputError, match='token_kl'): grpo_loss(**batch, kl_coef=.1, kl_estimator='forward')
    for estimator in EXACT_KL:    # weighs nothing, so it may be missing; that the policy moves is seen all the same
        assert grpo_loss(**batch, kl_estimator=estimator)[1]['kl'] == grpo_loss(**batch, kl_estimator='kl3')[1]['kl'] > 0
    with pytest.raises(MissingInputError, match='entropy_coef=0.1'): grpo_loss(**batch, entropy_coef=.1)
    with pytest.raises(MissingInputError, match='max_completion_length'): grpo_loss(**batch, loss_type='dr_grpo')
    with pytest.raises(SettingError, match='clip_low=-0.1'): grpo_loss(**batch, clip_low=-.1)


@pytest.mark.parametrize('options', [dict(entropy_coef=.1, entropy=torch.ones(4, 5)),
                                     dict(kl_coef=.1, kl_estimator='forward', token_kl=torch.ones(4, 5))])
def test_a_term_that_could_not_act_is_refused(options):
    batch = make_batch(1)
    batch['logprobs'].requires_grad_()
    with pytest.raises(MissingInputError, match='graph'): grpo_loss(**batch, **options)
    with torch.no_grad(): grpo_loss(**batch, **options)  # for the metrics alone it is fine


@pytest.mark.parametrize('name, shape', [('old_logprobs', (4, 4)), ('ref_logprobs', (1, 5)), ('completion_mask', (4, 1)),
                                         ('advantages', (5,)), ('advantages', (4, 1))])
def test_shapes_that_would_broadcast_in_silence_are_refused(name, shape):
    with pytest.raises(BatchShapeError, match=name): grpo_loss(**make_batch(1) | {name: torch.ones(shape)})


def test_groups_must_divide_the_batch():
    for rewards, size in ((torch.ones(5), 2), (torch.ones(4), 0), (torch.ones(2, 2), 2)):
        with pytest.raises(BatchShapeError, match='group_size'): by_group(rewards, size)


# ---------------------------------------------------------------- advantages

def loop_advantages(rewards, size, baseline, scale):
    "Advantages with the statistics module, ties decided by equality."
    result, groups = [], [rewards[i:i + size] for i in range(0, len(rewards), size)]
    for group in groups:
        for i, reward in enumerate(group):
            mean, wide = statistics.fmean(group), statistics.pstdev(group)
            level = {'group_mean': mean, 'ema': statistics.fmean(rewards), 'adaptive': mean,
                     'leave_one_out': statistics.fmean(group[:i] + group[i + 1:])}[baseline]
            median = statistics.median(group)
            if baseline == 'adaptive' and (wide > .3 or abs(mean - median) > .2 * wide): level = median
            spread = {'group': statistics.stdev(group), 'batch': statistics.stdev(rewards), 'none': None}[scale]
            value = reward - level if spread is None else (reward - level) / (spread + 1e-4)
            result.append(0.0 if len(set(group)) == 1 else value)
    return result


@pytest.mark.parametrize('baseline', BASELINES)
@pytest.mark.parametrize('scale', REWARD_SCALES)
@settings(max_examples=20)
@given(seed=SEEDS, size=st.integers(2, 6), groups=st.integers(1, 4), levels=st.integers(1, 4))
def test_advantages_equal_plain_statistics(baseline, scale, seed, size, groups, levels):
    rewards = torch.randint(0, levels + 1, (size * groups,), generator=rng(seed)).double() * .37 - .3
    expected = loop_advantages(rewards.tolist(), size, baseline, scale)
    assert_close(compute_advantages(rewards, size, baseline, scale), fp64(expected), **EXACT)


@pytest.fixture
def every_warning():
    torch.set_warn_always(True)    # PyTorch warns of a place once in a process
    yield
    torch.set_warn_always(False)


@pytest.mark.filterwarnings('error')
@pytest.mark.usefixtures('every_warning')
@pytest.mark.parametrize('scale', REWARD_SCALES)
@pytest.mark.parametrize('baseline', BASELINES)
def test_the_spread_of_groups_of_one_is_not_even_asked_for(baseline, scale):
    assert compute_advantages(torch.tensor([.5, .7]), 1, baseline, scale).tolist() == [0.0, 0.0]


@settings(max_examples=60)
@given(reward=st.floats(-.25, 1, width=32), size=st.integers(1, 16), baseline=st.sampled_from(BASELINES),
       scale=st.sampled_from(REWARD_SCALES))
def test_a_tied_group_is_exactly_zero_beside_any_other(reward, size, baseline, scale):
    tied = torch.full((size,), reward)
    assert compute_advantages(tied, size, baseline, scale).tolist() == [0.0] * size
    both = compute_advantages(torch.cat([torch.rand(size, generator=rng(size)), tied]), size, baseline, scale)
    assert both[size:].tolist() == [0.0] * size and torch.isfinite(both).all()


@pytest.mark.parametrize('baseline', BASELINES)
def test_a_run_at_an_old_level_does_not_move_a_tied_group(baseline):
    tracker = EMATracker()
    compute_advantages(torch.tensor([0., 1.]), 2, baseline, tracker=tracker)
    assert compute_advantages(torch.tensor([.9, .9]), 2, baseline, 'none', tracker).tolist() == [0.0, 0.0]


@pytest.mark.parametrize('baseline', BASELINES)
@settings(max_examples=15)
@given(seed=SEEDS, data=st.data())
def test_advantages_follow_their_rows(baseline, seed, data):
    groups = torch.rand(4, 3, generator=rng(seed), dtype=torch.float64)
    result = compute_advantages(groups.flatten(), 3, baseline).view(4, 3)
    outer, inner = (torch.tensor(data.draw(st.permutations(range(count)))) for count in (4, 3))
    assert_close(compute_advantages(groups[outer][:, inner].flatten(), 3, baseline).view(4, 3), result[outer][:, inner], **EXACT)


@settings(max_examples=25)
@given(seed=SEEDS, size=st.integers(2, 8), shift=st.floats(-5, 5), factor=st.floats(.1, 10))
def test_unscaled_advantages_ignore_a_shift_and_follow_a_factor(seed, size, shift, factor):
    rewards = torch.rand(size, generator=rng(seed), dtype=torch.float64)
    for baseline in ('group_mean', 'leave_one_out'):
        expected = factor * compute_advantages(rewards, size, baseline, 'none')
        assert_close(compute_advantages(factor * rewards + shift, size, baseline, 'none'), expected, atol=1e-8, rtol=1e-8)


def test_integer_rewards_are_fine_and_gradients_are_not_kept():
    assert compute_advantages(torch.tensor([0, 1]), 2, scale_rewards='none').tolist() == [-.5, .5]
    assert not compute_advantages(torch.tensor([0., 1.], requires_grad=True), 2).requires_grad


def test_a_bad_reward_stays_in_its_group():
    result = compute_advantages(torch.tensor([math.nan, 1., 0., 1.]), 2)
    assert result[:2].isnan().all() and torch.isfinite(result[2:]).all()


def exact_policy_gradient(baseline, size):
    "Expected gradient of the loss at the first update (weighted by G), all groups of three arms enumerated, and that of -E[r]."
    arm_rewards, logits = fp64([.9, .2, .5]), fp64([.3, -.2, .6]).requires_grad_()
    logprobs = logits.log_softmax(-1)
    truth = torch.autograd.grad(-(logprobs.exp() @ arm_rewards), logits, retain_graph=True)[0]
    total = 0
    for arms in itertools.product(range(3), repeat=size):
        chosen = torch.tensor(arms)
        advantages = compute_advantages(arm_rewards[chosen], size, baseline, 'none')
        sampled = logprobs[chosen].unsqueeze(1)
        loss, _ = grpo_loss(sampled, sampled.detach(), None, advantages, torch.ones(size, 1, dtype=torch.bool))
        total = total + logprobs[chosen].sum().exp().detach() * loss
    return torch.autograd.grad(total, logits)[0], truth


@pytest.mark.parametrize('size', [2, 3, 4])
def test_leave_one_out_is_unbiased_and_group_mean_is_shrunk(size):
    gradient, truth = exact_policy_gradient('leave_one_out', size)
    assert_close(gradient, truth, **EXACT)
    gradient, _ = exact_policy_gradient('group_mean', size)
    assert_close(gradient, truth * (size - 1) / size, **EXACT)


def test_adaptive_takes_the_true_median_where_it_must():
    groups = torch.tensor([[0., 0., 0., .2], [.1, .2, .3, .4], [0., .2, .8, 1.]])
    assert_close(adaptive_baseline(groups), torch.tensor([[0.], [.25], [.5]]))
    lopsided = torch.tensor([[.50, .52, .54, .60]])
    assert_close(adaptive_baseline(lopsided), torch.tensor([[.53]]))
    assert_close(adaptive_baseline(lopsided, skew_limit=.9), lopsided.mean(1, keepdim=True))
    wide = torch.tensor([[0., .1, 1., 1.1, .5]])
    assert_close(adaptive_baseline(wide, skew_limit=1.), torch.tensor([[.5]]))


def test_one_running_mean_per_task_from_before_the_batch():
    tracker, past = EMATracker(momentum=.8), {}
    for step in range(6):
        rewards = torch.rand(8, generator=rng(step), dtype=torch.float64)
        tasks = ['P', 'A', 'P', 'P'] if step % 2 else ['A', 'P', 'A', 'A']
        result = compute_advantages(rewards, 2, 'ema', 'none', tracker, tasks)
        owner = [task for task in tasks for _ in range(2)]
        means = {task: statistics.fmean(r for r, name in zip(rewards.tolist(), owner) if name == task) for task in 'PA'}
        expected = [r - past.get(name, means[name]) for r, name in zip(rewards.tolist(), owner)]
        assert_close(result, fp64(expected), **EXACT)
        past = {task: .8 * past.get(task, means[task]) + .2 * means[task] for task in 'PA'}
    assert tracker.state_dict() == pytest.approx(past)


def test_the_tracker_resumes_and_a_bad_batch_does_not_poison_it():
    tracker = EMATracker()
    tracker.observe('P', .5)
    tracker.observe('P', math.nan)
    resumed = EMATracker()
    resumed.load_state_dict(tracker.state_dict())
    assert resumed.observe('P', 1.) == tracker.observe('P', 1.) == .5
    assert math.isfinite(resumed.observe('P', 0.))
    with pytest.raises(BatchShapeError, match='one per prompt'): compute_advantages(torch.ones(4), 2, 'ema', tasks=['P'])
    for name in BASELINES: assert compute_advantages(torch.tensor([0., 1.]).half(), 2, name, 'none').dtype == torch.float32
    with pytest.raises(SettingError, match='momentum=1.0'): EMATracker(1.)


# ---------------------------------------------------------------- ratios, rewards of tokens, critic

@pytest.mark.parametrize('estimator', SAMPLED_KL)
def test_only_ratios_of_tokens_make_the_gradient_that_of_the_kl(estimator):
    "All completions of four tokens from a table of logits: of a sequence's ratio only one n-th of the correction arrives."
    size, (start, reference) = 4, torch.randn(2, 4, 3, generator=rng(0), dtype=torch.float64).log_softmax(-1)
    every = torch.tensor(list(itertools.product(range(3), repeat=size)))
    mask, chance = torch.ones_like(every, dtype=torch.bool), start[torch.arange(size), every].sum(1).exp()

    def gradient(level):
        logits = start.clone().requires_grad_()
        logprobs = logits.log_softmax(-1)[torch.arange(size), every]
        kl = per_token_kl(logprobs, reference[torch.arange(size), every], estimator)
        if level: kl = reweight_kl(kl, importance_ratio(logprobs, logprobs.detach(), mask, level), estimator)
        return torch.autograd.grad(chance @ kl.sum(1), logits)[0]

    logits = start.clone().requires_grad_()
    exact = torch.autograd.grad(exact_kl(logits.unsqueeze(0), reference.unsqueeze(0)).sum(), logits)[0]
    assert_close(gradient('token'), exact, **EXACT)
    share = 1 if estimator == 'kl2' else 1/size
    assert_close(gradient('sequence'), gradient(None) + share*(exact - gradient(None)), **EXACT)


def test_the_sequence_ratio_is_the_geometric_mean_over_active_tokens():
    batch = make_batch(6)
    ratio = importance_ratio(batch['logprobs'], batch['old_logprobs'], batch['completion_mask'], 'sequence')
    for i, row in enumerate(batch['completion_mask']):
        tokens = (batch['logprobs'] - batch['old_logprobs'])[i][row].exp().tolist()
        assert ratio[i].item() == pytest.approx(statistics.geometric_mean(tokens), abs=1e-9)


def loop_gae(rewards, values, gamma, lam):
    "A_t = sum over l of (gamma lambda)^l delta_{t+l}, for one completion."
    values = values + [0.0]
    deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(len(rewards))]
    return [sum((gamma * lam)**(s - t) * deltas[s] for s in range(t, len(deltas))) for t in range(len(deltas))]


@settings(max_examples=30)
@given(seed=SEEDS, rows=st.integers(1, 4), columns=st.integers(1, 6), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_equals_its_definition_row_by_row(seed, rows, columns, gamma, lam):
    mask = make_batch(seed, rows, columns)['completion_mask']
    values = torch.randn(rows, columns, generator=rng(seed), dtype=torch.float64).masked_fill(~mask, math.nan)
    rewards = place_rewards(torch.randn(rows, generator=rng(seed + 1), dtype=torch.float64), mask)
    advantages, returns = gae(rewards, values.clone().requires_grad_(), mask, gamma, lam)
    assert not advantages.requires_grad and not returns.requires_grad    # the critic learns from `value_loss` alone
    for i in range(rows):
        count = int(mask[i].sum())
        expected = loop_gae(rewards[i, :count].tolist(), values[i, :count].tolist(), gamma, lam)
        assert_close(advantages[i, :count], fp64(expected), **EXACT)
        assert_close(returns[i, :count], fp64(expected) + values[i, :count], **EXACT)
        assert not advantages[i, count:].any() and not returns[i, count:].any()


def test_samples_of_a_group_do_not_leak_into_each_other():
    mask = torch.ones(3, 4, dtype=torch.bool)
    values = torch.randn(3, 4, generator=rng(1))
    first, _ = gae(place_rewards(torch.tensor([1., 0., 0.]), mask), values, mask)
    second, _ = gae(place_rewards(torch.tensor([1., 5., -5.]), mask), values, mask)
    assert torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])


def test_rewards_are_placed_at_the_last_active_token():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0]])
    assert place_rewards(torch.tensor([1., 2., 3., 4.]), mask).tolist() == [[0, 1, 0], [0, 0, 2], [3, 0, 0], [0, 0, 0]]
    unjudged = place_rewards(torch.tensor([math.nan, 2., 3., 4.]), mask)
    assert unjudged[0].isnan().tolist() == [False, True, False] and unjudged[1:].isfinite().all()
    with pytest.raises(BatchShapeError, match='one reward per completion'): place_rewards(torch.ones(4, 1), mask)
    with pytest.raises(BatchShapeError, match='values'): gae(torch.zeros(4, 3), torch.zeros(4, 1), mask)


@pytest.mark.parametrize('level', ['token', 'sequence'])
def test_an_advantage_at_a_masked_token_reaches_no_gradient(level):
    logprobs = torch.zeros(1, 3, requires_grad=True)
    for advantage in (math.nan, math.inf, 9.):
        loss, _ = grpo_loss(logprobs, torch.zeros(1, 3), None, torch.tensor([[1., 1., advantage]]),
                            torch.tensor([[True, True, False]]), importance_level=level)
        gradient, = torch.autograd.grad(loss, logprobs)
        assert loss == -1 and gradient.tolist() == [[-.5, -.5, 0]]


def test_value_loss_value_gradient_and_micro_batches():
    mask = make_batch(8)['completion_mask']
    values, returns = torch.randn(2, 4, 5, generator=rng(9), dtype=torch.float64)
    returns = returns.masked_fill(~mask, math.nan)
    values.requires_grad_()
    loss = value_loss(values, returns, mask)
    errors = [v - r for v, r, on in zip(values.flatten().tolist(), returns.flatten().tolist(), mask.flatten().tolist()) if on]
    assert loss.item() == pytest.approx(sum(e * e for e in errors) / 2 / len(errors), abs=1e-9)
    gradient = torch.autograd.grad(loss, values)[0]
    assert_close(gradient[mask], fp64(errors) / len(errors), **EXACT)
    assert not gradient[~mask].any()    # where the returns are nan
    parts = [value_loss(values[i:i + 1], returns[i:i + 1], mask[i:i + 1], mask.sum()) for i in range(4)]
    assert_close(sum(parts), loss, **EXACT)


@pytest.mark.parametrize('values', [dict(kl_coef=-.5), dict(kl_coef=math.nan), dict(clip_low=math.nan), dict(clip_high=-.1)])
def test_a_weight_or_range_that_turns_the_loss_around_is_refused(values):
    with pytest.raises(SettingError, match=next(iter(values))): grpo_loss(**make_batch(1), **values)


@pytest.mark.parametrize('values', [dict(gamma=2.), dict(gamma=-.1), dict(gae_lambda=math.nan), dict(gae_lambda=1.1)])
def test_a_discount_is_a_share(values):
    with pytest.raises(SettingError, match=f'{next(iter(values))}=.* must be between 0 and 1'):
        gae(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), **values)


def test_the_targets_of_a_critic_have_its_shape():
    with pytest.raises(BatchShapeError, match='returns has shape'):
        value_loss(torch.zeros(2, 3), torch.zeros(2, 1), torch.ones(2, 3, dtype=torch.bool))


def test_half_precision_has_quantiles_and_nothing_has_no_loss():
    zeros, mask = torch.zeros(2, 3, dtype=torch.bfloat16), torch.ones(2, 3, dtype=torch.bool)
    assert grpo_loss(zeros, zeros, zeros, torch.zeros(2), mask)[1]['kl_95pct'] == 0
    for shape in ((0, 3), (2, 0)):
        with pytest.raises(BatchShapeError, match='no token'):
            grpo_loss(*[torch.zeros(shape)]*3, torch.zeros(shape[0]), torch.ones(shape, dtype=torch.bool))
