"""The trainer: planted faults are named, bad numbers never reach the weights, splitting changes nothing, and the reward provably rises."""
import copy
import itertools
import json
import math
import re
import weakref
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from rookworld_nb import trainer as trainer_module
from rookworld_nb.buffer import BufferConfig, CountingTask, Experience, RolloutBuffer, counting_policy
from rookworld_nb.grpo import MissingInputError, grpo_loss
from rookworld_nb.kl import KLConfig, SettingError
from rookworld_nb.model import GPT
from rookworld_nb.positions import Sample
from rookworld_nb.ranks import ALONE
from rookworld_nb.rewards import Scores
from rookworld_nb.sampling import completion_logprobs, sample
from rookworld_nb.trainer import (RECENT, Critic, FirstUpdateError, Health, Learning, MicroBatch, Trainer, TrainerConfig, accumulate_gradients, build_optimizer,
                                  check_first_update, find_failure, follow_kl, items_of, lr_factor, micro_batches, restore_trainer, speed, trainer_state, update, usual_piece)
from short_runs import without_clocks
from toy import G, TASK, collector


@pytest.fixture
def model(base):
    return copy.deepcopy(base)


def config(**options):
    return TrainerConfig(**{'steps': 20, 'lr': 3e-3, 'warmup_steps': 0, 'kl': KLConfig(kl_coef=.01), 'kl_divergence_threshold': None,
                            **options})


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(model, before):
    return all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def replay(source, replays):
    return RolloutBuffer(source, BufferConfig(replays=replays))


def steps(trainer, experiences, count):
    return list(itertools.islice(trainer.run(experiences), count))


#: Prompts of one, two and three tokens: real padding on the left.
UNEVEN = [[Sample('P: 1', '2'), Sample('P: 1 2', '3'), Sample('A: 3', '4 5'), Sample('A: 3 4 5', '6 7')]]


class Uneven(CountingTask):
    "Scores prompts of any length by the last digit."
    def score(self, prompt, completion):
        return super().score(f'{prompt[:2]} {prompt[-1]}', completion)


def uneven(model, **options):
    return next(collector(model, batches=UNEVEN, scorer=Uneven(), **options))


# the identity before the first update

@pytest.mark.parametrize('temperature', [.7, 1., 1.4])
@pytest.mark.parametrize('micro_batch_size', [None, 2, 8])
def test_the_identity_holds_whatever_padding_temperature_and_pieces(model, temperature, micro_batch_size):
    row, = Trainer(model, config(steps=1, micro_batch_size=micro_batch_size)).run([uneven(model, temperature=temperature)])
    assert abs(row['ratio_max'] - 1) < 1e-5 and row['clip_ratio/region_mean'] == 0 and abs(row['kl']) < 1e-6


def noise(model, experience):
    model.h[0].register_forward_hook(lambda layer, _, hidden: torch.nn.functional.dropout(hidden, .1))
    return experience


def with_rollouts(experience, change):
    return replace(experience, parts=tuple(replace(part, rollouts=change(part.rollouts)) for part in experience.parts))


def wrong_temperature(model, experience):
    return with_rollouts(experience, lambda r: replace(r, temperature=1.))


def rescored(sampler, experience, change=lambda r: r):
    "The experience as a sampler would have reported it that sees the rollouts through `change`."
    def scored(r):
        seen = change(r)
        with torch.no_grad():
            logprobs, _ = completion_logprobs(sampler, seen.prompt_ids, seen.prompt_mask, r.completion_ids, r.completion_mask, G, r.temperature)
        return replace(r, logprobs=logprobs)
    return with_rollouts(experience, scored)


def shifted_positions(model, experience):
    sampler = copy.deepcopy(model)
    with torch.no_grad():
        sampler.wpe.weight.copy_(sampler.wpe.weight.roll(-1, 0))
    return rescored(sampler, experience)


def padding_read_as_text(model, experience):
    return rescored(model, experience, lambda r: replace(r, prompt_mask=torch.ones_like(r.prompt_mask)))


def other_policy(model, experience):
    with torch.no_grad():
        model.h[1].mlp.c_fc.weight.mul_(.5)
    return experience


def other_reference(model, experience):
    return replace(experience, parts=tuple(replace(part, ref_logprobs=part.ref_logprobs - .1) for part in experience.parts))


def no_numbers(model, experience):
    with torch.no_grad():
        model.ln_f.weight[0] = math.nan
    return experience


FAULTS = {noise: 'dropout or other noise', wrong_temperature: r'sampled at 0\.7, the loss uses 1', shifted_positions: 'positions, masks or cache',
          padding_read_as_text: 'only rows whose prompt is padded', other_policy: 'the policy has other weights',
          other_reference: 'the reference', no_numbers: 'not finite'}


@pytest.mark.parametrize('fault', FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize('micro_batch_size', [None, 8])
def test_a_planted_fault_ends_the_run_before_it_moves_and_is_named(fault, micro_batch_size):
    torch.manual_seed(0)
    model = counting_policy(steps=0)    # untrained: uncertain of every token, so that every row can disagree
    experience = fault(model, uneven(model, temperature=.7))
    before, trainer = weights(model), Trainer(model, config(micro_batch_size=micro_batch_size))
    with pytest.raises(FirstUpdateError, match=f'Likely cause: .*{FAULTS[fault]}'):
        next(trainer.run([experience]))
    assert fault is no_numbers or same(model, before)
    assert not trainer.optimizer.state and all(p.grad is None for p in model.parameters())


def test_a_piece_of_padded_rows_alone_says_nothing_about_padding():
    torch.manual_seed(0)
    model = counting_policy(steps=0)
    experience = uneven(model)
    with torch.no_grad(): model.wte.weight.mul_(2)    # every row disagrees
    with pytest.raises(FirstUpdateError, match=f'Likely cause: .*{FAULTS[other_policy]}'):
        next(Trainer(model, config(micro_batch_size=G)).run([experience]))


def test_the_message_gives_the_numbers(model):
    experience = wrong_temperature(model, uneven(model, temperature=.5))
    with pytest.raises(FirstUpdateError, match=r'largest \|ratio - 1\| is \d\S* against the sampler and \d\S* against the reference \(limit 0.001\).* \d+\.\d% of the tokens .* KL is \d'):
        next(Trainer(model, config()).run([experience]))


def test_the_tolerance_is_the_users(model):
    experience = other_reference(model, uneven(model))
    next(Trainer(model, config(identity_tolerance=.2)).run([experience]))


def test_the_check_is_of_the_first_update_only(model):
    source, trainer = collector(model), Trainer(model, config())
    steps(trainer, source, 1)
    model.wte.register_forward_hook(lambda layer, _, out: torch.nn.functional.dropout(out, .01))
    assert len(steps(trainer, source, 1)) == 1


def test_the_check_waits_for_the_first_update_that_has_a_token(model):
    empty, trainer = without_tokens(next(collector(model))), Trainer(model, config())
    steps(trainer, iter([empty]*2), 2)
    with pytest.raises(FirstUpdateError, match='Likely cause'): next(trainer.run([wrong_temperature(model, uneven(model, temperature=.5))]))
    assert trainer.step == 2 and not trainer.optimizer.state
    steps(trainer, iter([uneven(model), empty]), 2)
    model.wte.register_forward_hook(lambda layer, _, out: torch.nn.functional.dropout(out, .01))
    assert len(steps(trainer, collector(model), 1)) == 1    # an update has been made


def without_tokens(experience):
    "Nothing of it counts: as if every completion had been cut off."
    return replace(experience, parts=tuple(replace(part, loss_mask=torch.zeros_like(part.loss_mask)) for part in experience.parts))


def test_without_reference_only_the_ratio_is_checked(model):
    row, = Trainer(model, config(steps=1, kl=KLConfig(kl_coef=0.))).run([uneven(model, ref_model=None)])
    assert 'kl' not in row and row['ratio_max'] == pytest.approx(1, abs=1e-5)


# splitting changes nothing

@pytest.mark.parametrize('loss_type', ['dapo', 'grpo', 'bnpo', 'dr_grpo'])
@pytest.mark.parametrize('importance_level', ['token', 'sequence'])
def test_the_update_is_the_same_whatever_the_pieces(base, loss_type, importance_level):
    model = copy.deepcopy(base).double()
    experience = uneven(copy.deepcopy(base))
    found = []
    for size in (None, 8, 4, 2, 1):
        trainer = Trainer(copy.deepcopy(model), config(loss_type=loss_type, importance_level=importance_level, micro_batch_size=size, entropy_coef=.01))
        rows = steps(trainer, [experience]*3, 3)
        found.append((weights(trainer.model), rows[-1]))
    for parameters, row in found[1:]:
        assert_close(parameters, found[0][0], rtol=1e-7, atol=1e-9)
        for name in without_clocks(row):
            assert row[name] == pytest.approx(found[0][1][name], rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize('loss_type', ['dapo', 'grpo', 'dr_grpo'])
def test_the_gradient_equals_that_of_one_padded_batch(base, loss_type):
    "P and A as parts, against both tasks in one batch through the plain forward pass of the model."
    model, experience = copy.deepcopy(base).double(), uneven(base)
    ids = [torch.cat([r.prompt_ids[i//G][r.prompt_mask[i//G]], r.completion_ids[i][r.completion_mask[i]]])
           for r in (part.rollouts for part in experience.parts) for i in range(len(r.texts))]
    sizes = [int(mask.sum()) for part in experience.parts for mask in part.rollouts.completion_mask]
    batch = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    logits = model(batch, torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in ids], batch_first=True))
    logp = logits.log_softmax(-1)[:, :-1].gather(2, batch[:, 1:, None])[..., 0]
    per_row = [logp[i, len(row)-1-n:len(row)-1] for i, (row, n) in enumerate(zip(ids, sizes))]
    advantages = torch.cat([part.advantages for part in experience.parts]).double()
    policy = [-(new - new.detach()).exp()*a for new, a in zip(per_row, advantages)]
    total = {'dapo': sum(p.sum() for p in policy)/sum(sizes), 'grpo': sum(p.mean() for p in policy)/len(policy),
             'dr_grpo': sum(p.sum() for p in policy)/(len(policy)*3)}[loss_type]
    total.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])

    split = copy.deepcopy(base).double()
    accumulate_gradients(Learning(split, config(loss_type=loss_type), 0., items_of(experience, loss_type), 1, 3), experience)
    found = torch.cat([p.grad.flatten() for p in split.parameters()])
    assert_close(found, expected, rtol=1e-4, atol=1e-6)  # the sampler's old log-probabilities are fp32


def test_pieces_hold_every_row_once(model):
    experience = uneven(model)
    for size in (None, 8, 4, 2, 1):
        cut = list(micro_batches(experience, size))
        ids = [row for m in cut for row in m.completion_ids.tolist()]
        assert ids == [row for part in experience.parts for row in part.rollouts.completion_ids.tolist()]
        prompts = [row for m in cut for row in m.prompt_ids.repeat_interleave(m.group_size, 0).tolist()]
        assert prompts == [row for part in experience.parts for row in part.rollouts.prompt_ids.repeat_interleave(G, 0).tolist()]
        assert all(len(m.completion_ids) <= (size or 99) for m in cut)


@pytest.mark.parametrize('tokens, pieces', [(10**6, 1), (1, 4), (12, 2)])
def test_the_usual_piece_holds_whole_groups_and_about_so_many_tokens(model, monkeypatch, tokens, pieces):
    "Four prompts of 2 tokens with four completions of at most 1 each: 24 tokens."
    monkeypatch.setattr(trainer_module, 'PIECE_TOKENS', tokens)
    rollouts = sample(model, CountingTask().tokenizer, ['P: 1', 'P: 2', 'P: 3', 'P: 4'], G, 1, 1.)
    assert usual_piece(rollouts)*pieces == len(rollouts.texts) == 4*G
    assert usual_piece(rollouts.to('meta')) == 4*G    # any device but a CPU wants all at once


def test_the_usual_pieces_are_what_a_step_takes(model, monkeypatch):
    experience, seen = uneven(model), []
    monkeypatch.setattr(trainer_module, 'PIECE_TOKENS', 1)
    monkeypatch.setattr(MicroBatch, 'hidden', lambda micro, model, hidden=MicroBatch.hidden: seen.append(len(micro.completion_ids)) or hidden(micro, model))
    steps(Trainer(model, config(steps=1)), [experience], 1)
    assert seen == [G]*len(UNEVEN[0])


@pytest.mark.parametrize('size', [3, 6, 10])
def test_pieces_that_would_part_a_group_unevenly_are_refused(model, size):
    with pytest.raises(SettingError, match=f'micro_batch_size={size} .* group_size=4'):
        next(Trainer(model, config(micro_batch_size=size)).run([uneven(model)]))


# learning

def expected_reward(model):
    "Exact mean reward over all P prompts and all 157 completions of at most two tokens."
    first, second = torch.meshgrid(torch.arange(13), torch.arange(13), indexing='ij')
    ids = torch.stack([first.flatten(), second.flatten()], 1)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[ids[:, 0] == 0, 1] = False
    keep = mask[:, 1] | (ids[:, 1] == 0)
    ids, mask = ids[keep], mask[keep]
    words = {i: word for word, i in TASK.tokenizer.get_vocab().items()}
    texts = [' '.join(words[i] for i, m in zip(row, ok) if m and i) for row, ok in zip(ids.tolist(), mask.tolist())]
    total = 0.
    for one in TASK.samples[:10]:
        prompt = torch.tensor([TASK.tokenizer.encode(one.prompt).ids])
        with torch.no_grad():
            logprobs, _ = completion_logprobs(model, prompt, torch.ones_like(prompt, dtype=torch.bool), ids, mask, len(ids), 1.)
        probability = logprobs.sum(1).exp()
        assert probability.sum().item() == pytest.approx(1, abs=1e-4)
        total += float((probability*TASK([one.prompt]*len(ids), texts).rewards).sum())
    return total/10


def test_the_exact_expected_reward_rises(model):
    start = expected_reward(model)
    trainer = Trainer(model, config(steps=40, lr=3e-3, kl=KLConfig(kl_coef=.001)))
    rows = list(trainer.run(replay(collector(model, env=0., prompts=8), 2)))
    assert start < .45 and expected_reward(model) > start + .25
    assert len(rows) == 40 and trainer.stop_reason == 'all 40 steps are done'


def test_the_reward_falls_when_the_scorer_is_turned_round(model):
    def scorer(prompts, completions, targets=None):
        scores = TASK(prompts, completions)
        return Scores(-scores.rewards, scores.components)
    start = expected_reward(model)
    steps(Trainer(model, config(lr=3e-3)), collector(model, env=0., prompts=8, scorer=scorer), 10)
    assert expected_reward(model) < start - .03


def test_replays_are_steps_and_the_second_pass_has_another_ratio(model):
    rows = steps(Trainer(model, config()), replay(collector(model), 2), 6)
    assert [row['step'] for row in rows] == [1, 2, 3, 4, 5, 6]
    for first, second in zip(rows[::2], rows[1::2]):
        assert abs(first['ratio_max'] - 1) < 1e-4 < abs(second['ratio_max'] - 1)
        assert first['num_tokens'] == second['num_tokens'] and first['reward'] == second['reward']


def test_the_entropy_bonus_keeps_the_policy_open(base):
    def entropy(coef):
        model = copy.deepcopy(base)
        silent = replace(uneven(model), parts=tuple(replace(p, advantages=torch.zeros_like(p.advantages)) for p in uneven(model).parts))
        return steps(Trainer(model, config(entropy_coef=coef, kl=KLConfig(kl_coef=0.))), [silent]*6, 6)[-1]['entropy']
    assert entropy(.1) > entropy(0.) + .01 > entropy(-.1) + .02


# metrics

def test_metrics_against_a_plain_forward_pass(model):
    experience = uneven(model, temperature=.8)
    trainer = Trainer(model, config(lr=1e-2, kl_unbiased=False))
    steps(trainer, [experience], 1)
    frozen = copy.deepcopy(model)
    row = update(trainer, experience)
    tokens = []                                     # (advantage, log ratio, log pi - log ref, entropy)
    for part in experience.parts:
        r = part.rollouts
        for i in range(len(r.texts)):
            prompt, answer = r.prompt_ids[i//G][r.prompt_mask[i//G]], r.completion_ids[i][r.completion_mask[i]]
            with torch.no_grad():
                logp = (frozen(torch.cat([prompt, answer])[None])[0, len(prompt)-1:-1]/.8).log_softmax(-1)
            new = logp[torch.arange(len(answer)), answer]
            old, ref = r.logprobs[i][:len(answer)], part.ref_logprobs[i][:len(answer)]
            tokens += zip([float(part.advantages[i])]*len(answer), (new - old).tolist(), (new - ref).tolist(), (-(logp.exp()*logp).sum(-1)).tolist())
    ratio = [math.exp(lr) for _, lr, *_ in tokens]
    kl = sorted(math.exp(-d) - 1 + d for _, _, d, _ in tokens)
    low = [w < .8 and a < 0 for (a, *_), w in zip(tokens, ratio)]
    high = [w > 1.2 and a > 0 for (a, *_), w in zip(tokens, ratio)]
    at = .95*(len(kl) - 1)
    share = sum(max(-w*a, -min(max(w, .8), 1.2)*a) for (a, *_), w in zip(tokens, ratio))/len(tokens)
    expected = {'kl': sum(kl)/len(kl), 'kl_95pct': kl[math.floor(at)] + (at % 1)*(kl[math.ceil(at)] - kl[math.floor(at)]),
                'entropy': sum(t[3] for t in tokens)/len(tokens), 'ratio_max': max(ratio), 'clip_ratio/low_mean': sum(low)/len(low),
                'clip_ratio/high_mean': sum(high)/len(high), 'clip_ratio/region_mean': (sum(low) + sum(high))/len(low),
                'loss': share + .01*sum(kl)/len(kl), 'step': 2}
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, rel=2e-3, abs=2e-5), name


NAMES = ('step loss reward reward_std frac_reward_zero_std kl kl_95pct kl_coef entropy clip_ratio/low_mean clip_ratio/high_mean '
         'clip_ratio/region_mean ratio_max completions/mean_length completions/clipped_ratio grad_norm learning_rate num_tokens '
         'step_time skipped_updates perf/gen_tok_s perf/train_tok_s perf/mfu rewards/P_format/mean rewards/A_right/std').split()


def test_rows_have_the_usual_names_and_are_plain_finite_numbers(model):
    rows = steps(Trainer(model, config()), replay(collector(model), 2), 4)
    assert not set(NAMES) - set(rows[0]) and all(set(row) == set(rows[0]) for row in rows)
    assert all(type(value) in (int, float) and math.isfinite(value) for row in rows for value in row.values())
    json.dumps(rows, allow_nan=False)


def test_utilisation_is_what_an_update_needs_of_what_was_possible(model, monkeypatch):
    experience, cfg = next(collector(model)), model.cfg
    monkeypatch.setattr('rookworld_nb.trainer.product_rate', lambda device, bf16: 1e6)
    needed = tokens = 0
    for rollouts in (part.rollouts for part in experience.parts):
        for b, prompt in enumerate(rollouts.prompt_mask.sum(1).tolist()):
            written = rollouts.completion_mask.view(-1, G, rollouts.completion_mask.shape[1])[b].sum(1).tolist()
            weights = 12*cfg.n_embd**2*cfg.n_layer
            needed += 2*weights*(prompt + sum(n - 1 for n in written)) + 2*cfg.vocab_size*cfg.n_embd*sum(written)
            needed += 4*cfg.n_layer*cfg.n_embd*(sum(range(1, prompt + 1)) + sum(prompt + t for n in written for t in range(1, n)))
            tokens += sum(written)
    learning = Learning(model, config(), .01, 1, 1, 3)
    assert speed(learning, experience, 2.) == pytest.approx({'perf/train_tok_s': tokens/2, 'perf/mfu': 3*needed/2e6})
    assert speed(replace(learning, ranks=replace(ALONE, size=4)), experience, 2.)['perf/mfu'] == pytest.approx(3*needed/8e6)


def test_step_time_holds_the_sampling_but_not_the_listener(model, monkeypatch):
    clock = [0.]
    monkeypatch.setattr('rookworld_nb.trainer.time.perf_counter', lambda: clock[0])
    monkeypatch.setattr(trainer_module, 'product_rate', lambda device, bf16: 1e6)    # has the same clock, which must not stand still for it

    def slow():
        for experience in itertools.islice(collector(model), 3):
            clock[0] += 7
            yield experience

    for row in Trainer(model, config()).run(slow()):
        assert row['step_time'] == 7
        clock[0] += 100


# numbers that are none

def spoiled(experiences, value):
    "The same, with one advantage that is no number: `Scores` lets no such reward in."
    for experience in experiences:
        first, *others = experience.parts
        advantages = first.advantages.index_fill(0, torch.tensor([1]), value)
        yield replace(experience, parts=(replace(first, advantages=advantages), *others))


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize('when', [0, 2])
def test_a_bad_advantage_moves_nothing(model, value, when):
    trainer = Trainer(model, config())
    rows = steps(trainer, collector(model), when)
    before, state = weights(model), copy.deepcopy(trainer.optimizer.state_dict())
    row, = steps(trainer, spoiled(collector(model), value), 1)
    assert row['skipped_updates'] == trainer.health.skipped == 1 and same(model, before)
    assert_close(trainer.optimizer.state_dict()['state'], state['state'], rtol=0, atol=0)
    assert [r['skipped_updates'] for r in rows] == [0]*when and row['step'] == when + 1
    row, = steps(trainer, collector(model), 1)
    assert row['skipped_updates'] == 1 and not same(model, before) and math.isfinite(row['loss'])
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize('value', [math.nan, math.inf])
@pytest.mark.parametrize('micro_batch_size', [None, 4])
def test_a_bad_gradient_moves_nothing(model, value, micro_batch_size):
    bad = model.ln_f.bias.register_hook(lambda gradient: torch.full_like(gradient, value))
    before, trainer = weights(model), Trainer(model, config(micro_batch_size=micro_batch_size))
    row, = steps(trainer, collector(model), 1)
    assert math.isfinite(row['loss']) and not math.isfinite(row['grad_norm'])
    assert trainer.health.skipped == 1 and same(model, before) and not trainer.optimizer.state
    bad.remove()
    steps(trainer, collector(model), 1)
    assert trainer.health.skipped == 1 and not same(model, before)


def test_one_bad_piece_of_many_is_enough(model):
    experience = uneven(model)
    experience.parts[-1].advantages[-1] = math.nan
    before, trainer = weights(model), Trainer(model, config(micro_batch_size=2))
    steps(trainer, [experience], 1)
    assert trainer.health.skipped == 1 and same(model, before)


def test_a_skipped_step_is_logged(model, caplog):
    steps(Trainer(model, config()), spoiled(collector(model), math.nan), 1)
    assert 'step 1 skipped' in caplog.text


# the learning rate

@pytest.mark.parametrize(('schedule', 'expected'), [
    ('cosine', {1: .25, 2: .5, 3: .75, 4: 1., 8: .1 + .9*.5*(1 + math.cos(math.pi/3)), 10: .55, 16: .1, 20: .1}),
    ('linear', {1: .25, 4: 1., 10: .55, 13: .325, 16: .1, 20: .1}),
    ('constant', {1: .25, 2: .5, 4: 1., 5: 1., 16: 1., 20: 1.})])
def test_schedules(schedule, expected):
    settings = TrainerConfig(steps=16, warmup_steps=4, lr_schedule=schedule)
    assert {step: lr_factor(step, settings) for step in expected} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(('steps_', 'warmup'), [(1, 0), (1, 1), (1, 10), (5, 5), (5, 4), (2, 0), (100, 1)])
@pytest.mark.parametrize('schedule', ['cosine', 'linear', 'constant'])
def test_every_step_has_a_rate_above_zero_and_no_step_more_than_the_highest(steps_, warmup, schedule):
    settings = TrainerConfig(steps=steps_, warmup_steps=warmup, lr_schedule=schedule)
    factors = [lr_factor(step, settings) for step in range(1, steps_ + 1)]
    assert all(0 < factor <= 1 for factor in factors) and factors[0] == (1 if warmup < 2 else 1/warmup)


def test_the_scheduled_rate_is_the_one_that_is_used(model):
    trainer = Trainer(model, config(steps=4, warmup_steps=2, lr=1e-3))
    for row in trainer.run(collector(model)):
        assert row['learning_rate'] == 1e-3*lr_factor(row['step'], trainer.config)
        assert [group['lr'] for group in trainer.optimizer.param_groups] == [row['learning_rate']]*2


def test_the_first_step_moves_by_its_rate(model):
    "Adam's first update is lr * sign(gradient): the largest change is the rate of step 1 itself, not 0."
    before = weights(model)
    steps(Trainer(model, config(steps=10, warmup_steps=5, lr=1e-3, weight_decay=0., kl=KLConfig(kl_coef=0.))), collector(model), 1)
    assert max((p.detach() - before[name]).abs().max().item() for name, p in model.named_parameters()) == pytest.approx(2e-4, rel=1e-2)


# the optimiser

def test_decay_is_on_matrices_only(model):
    silent = replace(uneven(model), parts=tuple(replace(p, advantages=torch.zeros_like(p.advantages)) for p in uneven(model).parts))
    before = weights(model)
    row, = steps(Trainer(model, config(lr=.1, weight_decay=.5, kl=KLConfig(kl_coef=0.))), [silent], 1)
    assert row['grad_norm'] == 0
    for name, p in model.named_parameters():
        assert_close(p.detach(), before[name]*(.95 if p.dim() == 2 else 1.))


def test_frozen_parameters_stay(model):
    model.wpe.weight.requires_grad_(False)
    before = weights(model)
    trainer = Trainer(model, config())
    steps(trainer, collector(model), 2)
    assert torch.equal(model.wpe.weight, before['wpe.weight']) and not same(model, before)
    assert len([p for group in build_optimizer(model, config()).param_groups for p in group['params']]) == len(before) - 1


def test_a_piece_without_a_token_needs_no_gradient(model):
    "With a frozen embedding nothing that the piece computes depends on a trained parameter."
    model.wte.weight.requires_grad_(False)
    experience = uneven(model)
    first, *others = experience.parts
    mask = first.loss_mask.clone()
    mask[:experience.parts[0].rollouts.group_size] = False
    before = weights(model)
    row, = steps(Trainer(model, config(micro_batch_size=first.rollouts.group_size, kl=KLConfig(kl_coef=0.))),
                 [replace(experience, parts=(replace(first, loss_mask=mask), *others))], 1)
    assert row['grad_norm'] > 0 and not same(model, before)


@pytest.mark.parametrize('use_gae', [False, True])
def test_the_gradient_is_clipped_to_the_length(model, use_gae, monkeypatch):
    trainer, lengths = Trainer(model, config(grad_clip=.01, use_gae=use_gae)), []
    step, trained = trainer.optimizer.step, [*model.parameters(), *(trainer.critic.parameters() if use_gae else ())]
    monkeypatch.setattr(trainer.optimizer, 'step', lambda: (lengths.append(torch.cat([p.grad.flatten() for p in trained]).norm().item()), step()))
    row, = steps(trainer, collector(model), 1)
    assert row['grad_norm'] > .02 and lengths == [pytest.approx(.01, rel=1e-3)]


# the KL

def test_the_run_ends_where_the_policy_diverges(model):
    trainer = Trainer(model, config(steps=50, lr=.1, kl_divergence_threshold=.3, max_recoveries=0))
    source = collector(model)
    start, rows, seen = weights(model), [], []
    for row in itertools.islice(trainer.run(source), 50):
        rows.append(row)
        seen.append(same(model, start))
    assert trainer.diverged and 1 < len(rows) < 50 and rows[-1]['kl'] > .3 >= max(row['kl'] for row in rows[:-1])
    assert f'diverged at step {len(rows)}' in trainer.stop_reason and 'above 0.3' in trainer.stop_reason
    assert seen == [False]*(len(rows) - 1) + [True] and trainer.health.skipped == 0    # nothing later had been found sound
    assert 'last good state' in trainer.stop_reason and next(trainer.run(source), None) is None


def test_the_control_acts_once_per_collection(model):
    kl = KLConfig(kl_coef=.02, kl_control='adaptive', kl_target=1e-6)
    rows = steps(Trainer(model, config(lr=1e-2, kl=kl)), replay(collector(model), 3), 9)
    assert [row['kl_coef'] for row in rows] == pytest.approx([.02]*4 + [.02*1.5]*3 + [.02*1.5**2]*2)


def test_the_control_learns_nothing_from_steps_without_the_leash(model):
    kl = KLConfig(kl_coef=.02, kl_control='adaptive', kl_target=1e-6, kl_warmup_steps=2)
    rows = steps(Trainer(model, config(lr=1e-2, kl=kl)), collector(model), 5)
    assert [row['kl_coef'] for row in rows] == pytest.approx([0, 0, .02, .02, .02*1.5])


def test_the_control_goes_on_with_another_collector(model):
    kl = KLConfig(kl_coef=.02, kl_control='adaptive', kl_target=1e-6)
    trainer, other = Trainer(model, config(lr=1e-2, kl=kl)), collector(model)
    list(trainer.run(itertools.islice(collector(model), 4)))
    before = trainer.kl.kl_coef
    steps(trainer, other, 2)
    assert before == pytest.approx(.02*1.5**3) and trainer.kl.kl_coef == pytest.approx(before*1.5**2)


def test_the_warm_up_multiplies_the_coefficient(model):
    rows = steps(Trainer(model, config(kl=KLConfig(kl_coef=.5, kl_warmup_steps=2, kl_warmup_factor=.1))), replay(collector(model), 2), 4)
    assert [row['kl_coef'] for row in rows] == [.05, .05, .5, .5]


def test_the_coefficient_reaches_the_loss(base):
    def kl(coef):
        model = copy.deepcopy(base)
        return steps(Trainer(model, config(lr=1e-2, kl=KLConfig(kl_coef=coef))), collector(model), 12)[-1]['kl']
    assert kl(1.) < .5*kl(0.)


def test_a_coefficient_without_reference_is_refused(model):
    with pytest.raises(MissingInputError, match='ref'):
        next(Trainer(model, config(kl=KLConfig(kl_coef=.1))).run(collector(model, None)))


@pytest.mark.parametrize('estimator, needed', [('kl3', 'ref_logprobs'), ('forward', 'ref_hidden')])
def test_what_the_kl_will_need_after_its_warm_up_is_asked_for_at_once(model, estimator, needed):
    reference, warmed = copy.deepcopy(model), KLConfig(kl_coef=.02, kl_warmup_steps=2)
    trainer = Trainer(model, config(kl=warmed, kl_estimator=estimator), reference)
    with pytest.raises(MissingInputError, match=needed):
        next(trainer.run(collector(model, reference if needed == 'ref_hidden' else None)))
    assert trainer.step == 0


def test_the_policy_is_no_reference_of_itself(model):
    for make in (lambda: collector(model, model), lambda: Trainer(model, config(), model)):
        with pytest.raises(SettingError, match='the policy itself'): make()


@pytest.mark.parametrize('limit, warned', [(.5, 1), (None, 0)])
def test_a_limit_on_a_kl_that_nobody_measures_is_said_once(base, caplog, limit, warned):
    model = copy.deepcopy(base)
    trainer = Trainer(model, config(steps=3, kl=KLConfig(kl_coef=0.), kl_divergence_threshold=limit))
    assert len(list(trainer.run(collector(model, None)))) == 3
    assert sum('no limit on it' in record.message for record in caplog.records) == warned


def test_an_infinite_kl_is_a_skipped_update_and_no_divergence(model):
    def spoilt():
        for number, experience in enumerate(collector(model)):
            if number == 1: experience.parts[0].ref_logprobs[0, 0] = -math.inf
            yield experience
    trainer = Trainer(model, config(steps=3, kl_divergence_threshold=.5))
    rows = list(trainer.run(spoilt()))
    assert rows[1]['kl'] == math.inf and [row['skipped_updates'] for row in rows] == [0, 1, 1]
    assert trainer.health.recoveries == 0 and trainer.health.lr_scale == 1 and trainer.stop_reason == 'all 3 steps are done'


def test_a_kl_that_is_no_number_is_a_skipped_update(base):
    "The reference has become NaN, and with a weight of 0 the loss does not show it."
    model, reference = copy.deepcopy(base), copy.deepcopy(base)
    made = collector(model, reference)
    trainer = Trainer(model, config(steps=9, kl=KLConfig(kl_coef=0.), max_recoveries=0))
    rows = trainer.run(made)
    assert next(rows)['skipped_updates'] == 0
    with torch.no_grad(): reference.wte.weight.fill_(math.nan)
    mean = trainer.health.kl_mean
    assert [row['skipped_updates'] for row in rows] == [1, 2, 3] and '3 updates in a row were skipped' in trainer.stop_reason
    assert trainer.health.kl_mean == mean and math.isfinite(mean)    # the running mean has not taken it in


def test_a_skipped_update_moves_no_control(base):
    "The KL is a number and the gradient is not: the weights stay, and so does what the KL has led to."
    model = copy.deepcopy(base)
    trainer = Trainer(model, config(kl=KLConfig(kl_coef=.02, kl_control='adaptive')))
    rows = trainer.run(collector(model))
    next(rows), next(rows)
    next(model.parameters()).register_hook(lambda gradient: gradient*math.nan)
    before, mean, coefficient = weights(model), trainer.health.kl_mean, trainer.kl.kl_coef
    assert math.isfinite(next(rows)['kl']) and trainer.health.skipped == 1 and same(model, before)
    assert (trainer.health.kl_mean, trainer.kl.kl_coef) == (mean, coefficient)


@pytest.mark.parametrize('name, value', [('steps', 2.5), ('warmup_steps', -1), ('max_skipped', 0), ('max_recoveries', .5), ('micro_batch_size', 2.5), ('steps', '5')])
def test_a_count_is_whole(name, value):
    with pytest.raises(SettingError, match=f'{name}=.* must be a whole number'): config(**{name: value})


@pytest.mark.parametrize('estimator', ['kl1', 'kl2', 'kl3'])
def test_the_estimator_reaches_the_loss(base, estimator):
    model = copy.deepcopy(base)
    trainer = Trainer(model, config(kl_estimator=estimator, kl_unbiased=False, lr=1e-2, kl=KLConfig(kl_coef=1.)))
    experience = next(collector(model, env=0.))
    steps(trainer, [experience], 1)
    part = experience.parts[0]
    micro = next(micro_batches(experience))
    with torch.no_grad():
        loss, _ = grpo_loss(micro.logprobs(model)[0], part.rollouts.logprobs, part.ref_logprobs, part.advantages,
                            part.rollouts.completion_mask, kl_coef=1., kl_estimator=estimator, kl_unbiased=False)
    assert update(trainer, experience)['loss'] == pytest.approx(loss.item(), rel=1e-5)


# an exact KL

def whole_distributions(model, experience):
    "Log-probabilities over the vocabulary at every completion token, by a plain forward pass; one (T, V) a completion."
    found = []
    for part in experience.parts:
        r = part.rollouts
        for i in range(len(r.texts)):
            prompt, answer = r.prompt_ids[i//G][r.prompt_mask[i//G]], r.completion_ids[i][r.completion_mask[i]]
            logits = model(torch.cat([prompt, answer])[None])[0, len(prompt)-1:-1]
            found.append((logits/r.temperature).log_softmax(-1))
    return torch.cat(found)


@pytest.mark.parametrize('estimator', ['forward', 'reverse', 'symmetric'])
@pytest.mark.parametrize('micro_batch_size', [None, 4])
def test_an_exact_kl_is_that_of_the_whole_distributions_and_so_is_its_gradient(base, estimator, micro_batch_size):
    reference, model = copy.deepcopy(base), counting_policy(steps=60, seed=4)
    experience = uneven(model, ref_model=reference, temperature=.8, keep_ref_hidden=True)
    silent = replace(experience, parts=tuple(replace(p, advantages=torch.zeros_like(p.advantages)) for p in experience.parts))
    settings = config(kl_estimator=estimator, kl=KLConfig(kl_coef=.7), micro_batch_size=micro_batch_size)
    items = items_of(silent, 'dapo')
    model.zero_grad()
    metrics, _ = accumulate_gradients(Learning(model, settings, .7, items, items, 3, reference), silent)
    found = [p.grad.clone() for p in model.parameters()]
    assert all(p.grad is None for p in reference.parameters())
    model.zero_grad()
    with torch.no_grad():
        ref = whole_distributions(reference, silent)
    policy = whole_distributions(model, silent)
    forward, reverse = (policy.exp()*(policy - ref)).sum(-1), (ref.exp()*(ref - policy)).sum(-1)
    kl = {'forward': forward, 'reverse': reverse, 'symmetric': (forward + reverse)/2}[estimator].mean()
    (.7*kl).backward()
    assert metrics['kl'] == pytest.approx(kl.item(), rel=1e-4) and metrics['kl'] > .01
    assert metrics['loss'] == pytest.approx(.7*kl.item(), rel=1e-4)
    for gradient, p in zip(found, model.parameters()):
        assert_close(gradient, p.grad, atol=1e-5, rtol=1e-3)


def test_greedy_samples_have_an_exact_kl_too(base):
    "Temperature 0 counts as 1, as it does for log-probabilities."
    reference, model = copy.deepcopy(base), counting_policy(steps=60, seed=4)
    experience, found = uneven(model, ref_model=reference, temperature=1., keep_ref_hidden=True), []
    for temperature in (1., 0.):
        asked = with_rollouts(experience, lambda r: replace(r, temperature=temperature))
        items = items_of(asked, 'dapo')
        settings = config(kl_estimator='forward', kl=KLConfig(kl_coef=.7))
        metrics, _ = accumulate_gradients(Learning(model, settings, .7, items, items, 3, reference), asked)
        found.append(metrics['kl'])
    assert found[0] == found[1] > .01


def test_an_exact_kl_needs_the_reference(model):
    with pytest.raises(SettingError, match='forward'):
        Trainer(model, config(kl_estimator='forward'))


def test_a_kl_in_the_reward_is_measured_but_no_term_of_the_loss(model):
    other = counting_policy(steps=60, seed=4)
    experience = replace(uneven(model, ref_model=other), kl_penalty=.1)
    trainer = Trainer(model, config(kl=KLConfig(kl_coef=5.), identity_tolerance=1e9))
    row, = steps(trainer, [experience], 1)
    assert row['kl'] > .01 and 'kl_loss' not in row and row['loss'] == row['policy_loss'] and row['kl_coef'] == 5.


# a critic

def test_advantages_of_the_critic_are_those_of_gae(base):
    model, critic = copy.deepcopy(base), Critic(32)
    assert critic(torch.ones(1, 32)) == 0
    torch.manual_seed(0)
    torch.nn.init.normal_(critic.head.weight)
    experience = uneven(model)
    settings = config(use_gae=True, gamma=.9, gae_lambda=.8, kl=KLConfig(kl_coef=0.), value_loss_coef=.5)
    items = items_of(experience, 'dapo')
    learning = Learning(model, settings, 0., items, items, 3, None, critic)
    advantages, returns, values = [], [], []
    for micro in micro_batches(experience):
        columns = learning.piece(micro)
        for i, mask in enumerate(micro.completion_mask):
            n = int(mask.sum())
            v = columns['values'][i][:n].tolist() + [0.]
            rewards, carry, row = [0.]*(n - 1) + [float(micro.rewards[i])], 0., []
            for t in reversed(range(n)):
                carry = rewards[t] + .9*v[t+1] - v[t] + .9*.8*carry
                row.insert(0, carry)
            assert columns['advantages'][i][:n].tolist() == pytest.approx(row, abs=1e-5)
            advantages += row
            returns += [a + b for a, b in zip(row, v)]
            values += v[:n]
    metrics, _ = accumulate_gradients(learning, experience)
    error = sum((r - v)**2/2 for r, v in zip(returns, values))/len(values)
    assert metrics['value_loss'] == pytest.approx(error, rel=1e-4)
    assert metrics['loss'] == pytest.approx(-sum(advantages)/len(advantages) + .5*error, rel=1e-3)
    mean = sum(returns)/len(returns)
    left = [r - v for r, v in zip(returns, values)]
    spread = sum((x - sum(left)/len(left))**2 for x in left)/sum((r - mean)**2 for r in returns)
    assert metrics['explained_variance'] == pytest.approx(1 - spread, rel=1e-3)


def test_a_critic_does_not_replace_the_advantages_of_tokens(base):
    experience = uneven(base)
    parts = [replace(part, advantages=part.advantages[:, None]*part.loss_mask) for part in experience.parts]
    trainer = Trainer(copy.deepcopy(base), config(use_gae=True))
    with pytest.raises(SettingError, match='use_gae: .*credit by part'): next(trainer.run([replace(experience, parts=parts)]))
    assert trainer.step == 0


def test_with_a_critic_the_reward_rises_too(model):
    trainer = Trainer(model, config(steps=60, lr=3e-3, use_gae=True, gamma=1., kl=KLConfig(kl_coef=.001), value_loss_coef=1.))
    rows = list(trainer.run(replay(collector(model, env=0., prompts=8), 2)))
    assert sum(row['reward'] for row in rows[-6:]) > sum(row['reward'] for row in rows[:6]) + 6*.15
    assert rows[-1]['value_loss'] < rows[0]['value_loss'] and trainer.critic.head.weight.abs().max() > 0


# after a failure

@pytest.mark.parametrize('buffered', [False, True])
def test_an_update_that_leaves_nothing_to_sample_is_taken_back(model, buffered):
    "At once: a look, an examination or the next batch would meet it."
    before, experiences = weights(model), collector(model)
    trainer = Trainer(model, config(steps=9, lr=1e30, max_recoveries=2))
    for row in trainer.run(replay(experiences, 1) if buffered else experiences):
        assert all(p.isfinite().all() for p in model.parameters()) and model(torch.zeros(1, 2, dtype=torch.int64)).isfinite().all()
    assert row['step'] == 3 and trainer.diverged and same(model, before)
    assert trainer.stop_reason.startswith('diverged at step 3 after 2 recoveries: the policy computes NaN or infinity after the update')


def test_so_is_the_last_one(model):
    before, trainer = weights(model), Trainer(model, config(steps=1, lr=1e30))
    list(trainer.run(collector(model)))
    assert same(model, before) and trainer.stop_reason == 'all 1 steps are done; the last failed, taken back: the policy computes NaN or infinity after the update'


def test_a_diverged_run_goes_back_and_halves_its_rate(model):
    settings = config(steps=60, lr=.1, warmup_steps=0, kl_divergence_threshold=.3, max_recoveries=2, lr_schedule='constant')
    trainer, before = Trainer(model, settings), weights(model)
    source, rows = replay(collector(model), 2), []
    for row in itertools.islice(trainer.run(source), 60):
        if trainer.failure and not trainer.diverged:
            assert same(model, before) and not source.groups and not trainer.optimizer.state
        rows.append(row)
    assert trainer.diverged and trainer.health.recoveries == 2 and 'after 2 recoveries: kl is' in trainer.stop_reason
    falls = [row['step'] for row in rows if row['kl'] > .3]
    assert len(falls) == 3 and falls[-1] == len(rows)
    rates = [.1/2**sum(fall < row['step'] for fall in falls) for row in rows]
    assert [row['learning_rate'] for row in rows] == pytest.approx(rates)
    assert [row['recoveries'] for row in rows] == [sum(fall < row['step'] for fall in falls) for row in rows]


def test_a_last_step_that_failed_is_said(model):
    before = weights(model)
    trainer = Trainer(model, config(steps=2, lr=.1, warmup_steps=0, kl_divergence_threshold=.3, max_recoveries=1))
    rows = list(trainer.run(collector(model)))
    assert len(rows) == 2 and rows[-1]['kl'] > .3 and same(model, before) and not trainer.diverged
    assert trainer.stop_reason.startswith('all 2 steps are done; the last failed, taken back: kl is')


def test_a_recovery_goes_back_to_what_was_remembered_last(model):
    trainer = Trainer(model, config(steps=50, lr=3e-3))
    source = replay(collector(model), 2)
    run = trainer.run(source)
    for _ in range(4):
        next(run)
    trainer.remember()
    good, state = weights(model), copy.deepcopy(trainer.optimizer.state_dict()['state'])
    next(run)
    trainer.config = replace(trainer.config, kl_divergence_threshold=1e-9)
    next(run)
    assert trainer.health.recoveries == 1 and same(model, good)
    assert_close(trainer.optimizer.state_dict()['state'], state, rtol=0, atol=0)
    trainer.config = replace(trainer.config, kl_divergence_threshold=None)
    next(run)
    assert not same(model, good) and equal_states(trainer.good['model'], good)
    assert_close(trainer.good['optimizer']['state'], state, rtol=0, atol=0)    # for the next recovery


def test_a_proposed_state_counts_only_once_an_update_has_found_it_sound(model):
    trainer = Trainer(model, config(steps=50, lr=3e-3))
    run = trainer.run(replay(collector(model), 2))
    for _ in range(2): next(run)
    first = copy.deepcopy(trainer.good['model'])
    trainer.propose()
    trainer.config = replace(trainer.config, kl_divergence_threshold=1e-9)    # the proposed state has left
    next(run)
    assert trainer.health.recoveries == 1 and same(model, first)
    trainer.config = replace(trainer.config, kl_divergence_threshold=None)
    next(run)
    assert equal_states(trainer.good['model'], first)    # the proposal is forgotten
    trainer.propose()
    next(run)    # the same samples once more: they say nothing of the policy that has moved since
    assert equal_states(trainer.good['model'], first)
    proposed = weights(model)
    next(run)
    assert equal_states(trainer.good['model'], proposed) and not same(model, proposed)


def test_a_loop_of_ones_own_recovers_to_a_state_on_its_way(model):
    trainer = Trainer(model, config(steps=50, lr=3e-3, remember_every=3))
    run = trainer.run(collector(model))
    for _ in range(3): next(run)
    third = weights(model)
    for _ in range(2): next(run)
    assert equal_states(trainer.good['model'], third) and not same(model, third)
    trainer.config = replace(trainer.config, kl_divergence_threshold=1e-9)
    next(run)
    assert trainer.health.recoveries == 1 and same(model, third)


def test_neither_the_control_nor_a_good_state_hears_samples_of_an_older_policy(model):
    kl = KLConfig(kl_coef=.01, kl_control='adaptive', kl_target=1e-9)
    trainer, heard = Trainer(model, config(steps=60, lr=1e-2, kl=kl)), []
    source = RolloutBuffer(collector(model), BufferConfig(capacity=2, replays=2, minibatch_positions=1))
    def watched():
        for minibatch in source:
            heard.append(minibatch.fresh)
            yield minibatch
    moved = []
    trainer.kl.update = lambda kl, step: moved.append(step + 1)
    good = []
    for row in trainer.run(watched()):
        good.append(trainer.proposed)
        trainer.propose()
    assert moved == [step for step, new in enumerate(heard, 1) if new] and 0 < len(moved) < len(heard)
    assert good[1:] == [not new for new in heard[1:]]    # what was proposed waits for fresh samples


def test_an_update_without_a_token_is_skipped(model, caplog):
    trainer = Trainer(model, config(steps=9, max_skipped=3, kl=KLConfig(kl_coef=.5, kl_control='adaptive', kl_target=.05)))
    before = weights(model)
    empty = without_tokens(next(collector(model)))
    row, = steps(trainer, iter([empty]), 1)
    assert same(model, before) and row['skipped_updates'] == 1 and 'no token counts' in caplog.text
    assert trainer.health.kl_mean is None and not {'kl', 'kl_95pct', 'ratio_max', 'entropy', 'clip_ratio/region_mean'} & {*row}    # nothing was measured
    assert trainer.kl.kl_coef == .5 and not trainer.optimizer.state
    rows = steps(trainer, iter([empty]*6), 6)    # nothing is wrong with the policy
    assert len(rows) == 6 and not trainer.diverged and trainer.health.recoveries == 0 and trainer.broken is None


def test_an_update_without_a_token_does_not_end_a_row_of_broken_ones(model):
    bad, good = next(spoiled(collector(model), math.nan)), next(collector(model))
    empty = replace(good, parts=tuple(replace(part, loss_mask=torch.zeros_like(part.loss_mask)) for part in good.parts))
    trainer = Trainer(model, config(steps=9, max_skipped=2, max_recoveries=0))
    rows = steps(trainer, iter([bad, empty, bad, empty]), 4)
    assert len(rows) == 3 and trainer.diverged and '2 updates in a row' in trainer.stop_reason


def test_a_failed_update_does_not_move_the_kl_control(base):
    model = copy.deepcopy(base)
    kl = KLConfig(kl_coef=.1, kl_control='adaptive', kl_target=1e-4)
    trainer = Trainer(model, config(steps=9, lr=1e-2, max_recoveries=3, kl_divergence_threshold=1e-3, kl=kl))
    source, before = collector(model, copy.deepcopy(base)), []
    trainer.kl.update = lambda measured, step: before.append(measured)
    rows = steps(trainer, source, 6)
    assert trainer.health.recoveries and max(row['kl'] for row in rows) > 1e-3 and before and max(before) <= 1e-3


def test_a_masked_completion_gives_no_gradient(model):
    whole = next(collector(model, ref_model=None))
    def found(mask, advantages):
        parts = tuple(replace(part, loss_mask=part.loss_mask & mask[:len(part.rewards), None],
                              advantages=part.advantages + advantages[:len(part.rewards)]) for part in whole.parts)
        learner = copy.deepcopy(model)
        accumulate_gradients(Learning(learner, TrainerConfig(loss_type='grpo'), 0., 8, 20, 3), replace(whole, parts=parts))
        return torch.cat([p.grad.flatten() for p in learner.parameters() if p.grad is not None])
    odd, none = torch.arange(99) % 2 == 1, torch.zeros(99)
    masked = found(odd, none)
    assert_close(masked, found(odd, torch.where(odd, 0., 7.)), rtol=0, atol=0)
    assert not torch.allclose(masked, found(odd, torch.where(odd, 7., 0.)))


def test_a_checkpoint_that_nothing_has_judged_is_not_the_good_state_after_a_resume(base):
    first = Trainer(copy.deepcopy(base), config(steps=50, lr=1e-2))
    steps(first, collector(first.model), 1)
    first.propose()
    second = Trainer(copy.deepcopy(first.model), replace(first.config, kl_divergence_threshold=1e-9, max_recoveries=3))
    restore_trainer(second, copy.deepcopy(trainer_state(first)))
    steps(second, collector(second.model, copy.deepcopy(base)), 1)
    assert second.health.recoveries == 1 and same(second.model, weights(base)) and not same(first.model, weights(base))


def test_samples_with_a_bad_number_are_not_replayed(model):
    experiences = list(itertools.islice(collector(model), 3))
    experiences[1].parts[0].advantages[0] = math.nan
    trainer = Trainer(model, config(max_skipped=3))
    rows = steps(trainer, replay(iter(experiences), 4), 6)
    assert [math.isfinite(row['loss']) for row in rows] == [True]*4 + [False, True] and trainer.health.recoveries == 0


def equal_states(state, before):
    return all(torch.equal(state[name], value) for name, value in before.items())


def test_updates_skipped_in_a_row_are_a_failure(model):
    trainer = Trainer(model, config(steps=9, max_skipped=2, max_recoveries=1))
    rows = list(trainer.run(spoiled(collector(model), math.nan)))
    assert len(rows) == 4 and trainer.diverged and rows[-1]['skipped_updates'] == 4 and rows[-1]['recoveries'] == 1
    assert 'diverged at step 4 after 1 recoveries: 2 updates in a row' in trainer.stop_reason


def test_a_single_skipped_update_is_none(model):
    def experiences():
        while True:
            yield next(spoiled(collector(model), math.nan))
            yield next(collector(model))
    trainer = Trainer(model, config(steps=8, max_skipped=2))
    rows = list(trainer.run(experiences()))
    assert len(rows) == 8 and trainer.health.recoveries == 0 and rows[-1]['skipped_updates'] == 4


def test_what_went_wrong_is_recent_for_a_while_only(model):
    trainer = Trainer(copy.deepcopy(model), config(steps=RECENT + 4))
    bad, good = next(spoiled(collector(model), math.nan)), next(collector(model))
    rows = list(trainer.run([good, bad, bad] + [good]*(RECENT + 1)))
    assert [row['skipped_updates'] for row in rows] == [0, 1] + [2]*(RECENT + 2)
    assert [row['skipped_recently'] for row in rows] == [0, 1] + [2]*(RECENT - 1) + [1, 0, 0]
    trainer = Trainer(model, config(steps=9, max_skipped=2, max_recoveries=1))
    rows = list(trainer.run([bad, bad, good]))
    assert [(row['recoveries'], row['recoveries_recently']) for row in rows] == [(0, 0), (0, 0), (1, 1)]
    again = Trainer(model, config())
    restore_trainer(again, trainer_state(trainer))
    assert again.health == trainer.health and again.health.metrics(2 + RECENT)['recoveries_recently'] == 0
    old = {name: value for name, value in trainer_state(trainer)['health'].items() if not name.endswith('_at')}
    restore_trainer(again, trainer_state(trainer) | {'health': old})    # of a checkpoint that did not know of them
    assert again.health.metrics(3) == {'skipped_updates': 2, 'recoveries': 1, 'skipped_recently': 0, 'recoveries_recently': 0}


def test_a_refused_first_update_stays_the_first(model):
    trainer, experience = Trainer(model, config()), uneven(model)
    wrong = wrong_temperature(model, next(collector(model, temperature=.7)))
    for _ in range(2):
        with pytest.raises(FirstUpdateError):
            list(trainer.run([wrong]))
        assert trainer.step == 0
    assert [row['step'] for row in trainer.run([experience])] == [1]


LIMITS = dict(kl_divergence_threshold=.5, kl_tail_threshold=2., kl_spike_factor=4., kl=KLConfig(kl_target=.05))


@pytest.mark.parametrize(('kl', 'tail', 'mean', 'reason'), [
    (.4, 1., None, ''), (.51, 1., None, 'kl is 0.51 nats per token, above 0.5'), (.4, 2.1, None, 'kl_95pct is 2.1 nats per token, above 2'),
    (.19, 1., .01, ''), (.21, 1., .01, 'kl is 0.21 nats per token, above 0.2'), (.39, 1., .1, ''), (.41, 1., .1, 'above 0.4'), (math.nan, math.nan, .1, '')])
def test_each_limit_fires_above_itself(kl, tail, mean, reason):
    health = Health(kl_mean=mean)
    found = find_failure(health, {'kl': kl, 'kl_95pct': tail}, config(**LIMITS))
    assert reason in found and bool(found) == bool(reason)


def test_the_running_mean_follows_the_kl_and_ignores_failures():
    health, settings = Health(), config(**LIMITS)
    for kl, mean in ((.1, .1), (.2, .11), (.49, .11), (.01, .1)):
        if not find_failure(health, {'kl': kl}, settings): follow_kl(health, kl)
        assert health.kl_mean == pytest.approx(mean)


def test_without_limits_nothing_is_a_failure():
    free = config(kl_divergence_threshold=None)
    assert find_failure(Health(kl_mean=1e-9), {'kl': 1e9, 'kl_95pct': 1e9}, free) == ''


@pytest.mark.parametrize('micro_batch_size', [None, 4])
def test_the_table_of_a_skipped_update_names_the_broken_completions(model, micro_batch_size):
    trainer = Trainer(model, config(micro_batch_size=micro_batch_size))
    experience = uneven(model)
    experience.parts[1].advantages[2] = math.nan
    steps(trainer, [experience], 1)
    at = len(experience.parts[0].rewards) + 2
    assert trainer.broken['broken'].tolist() == [row == at for row in range(len(experience.table))]
    assert trainer.broken['completion'].tolist() == experience.table['completion'].tolist()
    steps(trainer, collector(model), 1)
    assert trainer.broken is None


# checkpoints

@pytest.mark.parametrize('options', [{}, {'use_gae': True}, {'kl': KLConfig(kl_coef=.02, kl_control='adaptive', kl_target=1e-4)}])
def test_a_restored_trainer_goes_on_as_the_first_would_have(base, options, tmp_path):
    experiences = list(itertools.islice(collector(copy.deepcopy(base), env=.5), 6))
    first = Trainer(copy.deepcopy(base), config(kl_divergence_threshold=9., kl_spike_factor=99., **options))
    steps(first, experiences[:3], 3)
    first.health.lr_scale, first.health.recoveries = .5, 1
    torch.save([trainer_state(first), first.model.state_dict()], tmp_path/'state.pt')
    expected = [without_clocks(row) for row in steps(first, experiences[3:], 3)]
    state, parameters = torch.load(tmp_path/'state.pt', weights_only=True)
    second = Trainer(copy.deepcopy(base), first.config)
    second.model.load_state_dict(parameters)
    restore_trainer(second, state)
    assert equal_states(second.good['model'], weights(base))
    rows = steps(second, experiences[3:], 3)
    assert [{name: row[name] for name in expected[0]} for row in rows] == expected and rows[0]['step'] == 4
    assert same(second.model, weights(first.model))


def test_gradients_of_the_models_past_do_not_matter(base):
    found = []
    for past in (None, 1.):
        model = copy.deepcopy(base)
        for p in model.parameters():
            p.grad = None if past is None else torch.full_like(p, past)
        steps(Trainer(model, config()), [uneven(copy.deepcopy(base))], 1)
        found.append(weights(model))
    assert_close(*found, rtol=0, atol=0)


def test_a_run_that_is_done_yields_nothing(model):
    trainer = Trainer(model, config(steps=2))
    steps(trainer, collector(model), 2)
    trainer.stop_reason = ''
    assert list(trainer.run(collector(model))) == [] and trainer.stop_reason == 'all 2 steps are done'


# the generator

def asked(model, numbers):
    for number, experience in enumerate(collector(model)):
        numbers.append(number)
        yield experience


def test_nothing_is_collected_that_is_not_learned_from(model):
    numbers = []
    run = Trainer(model, config(steps=3)).run(asked(model, numbers))
    assert numbers == []
    for expected in ([0], [0, 1], [0, 1, 2]):
        next(run)
        assert numbers == expected
    assert next(run, None) is None and numbers == [0, 1, 2]


def test_closing_early_cleans_up_and_the_run_can_go_on(model):
    trainer, source = Trainer(model, config(steps=3)), collector(model)
    run = trainer.run(source)
    next(run)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    run.close()
    assert all(p.grad is None for p in model.parameters()) and trainer.stop_reason == ''
    assert [row['step'] for row in trainer.run(source)] == [2, 3]


def test_stopping_and_going_on_is_the_same_as_not_stopping(base):
    whole, halves = (Trainer(copy.deepcopy(base), config()) for _ in range(2))
    steps(whole, collector(whole.model), 4)
    source = collector(halves.model)
    steps(halves, source, 2)
    steps(halves, source, 2)
    assert same(halves.model, weights(whole.model))


def test_no_more_experiences_is_an_ending(model):
    trainer = Trainer(model, config(steps=5))
    assert len(list(trainer.run(itertools.islice(collector(model), 2)))) == 2
    assert trainer.stop_reason == 'the experiences ended after step 2' and not trainer.diverged
    assert [row['step'] for row in trainer.run(itertools.islice(collector(model), 2))] == [3, 4]    # with others it goes on
    assert [row['step'] for row in trainer.run(collector(model))] == [5] and trainer.stop_reason == 'all 5 steps are done'


def test_items_are_counted_over_the_parts(model):
    experience = uneven(model)
    assert items_of(experience, 'dapo') == experience.table['tokens'].sum() and items_of(experience, 'grpo') == len(experience.table)


def test_check_first_update_is_silent_where_all_is_well(model):
    micro = next(micro_batches(uneven(model)))
    assert check_first_update(model, micro, micro.logprobs(model)[0], TrainerConfig()) is None


# bad settings

@pytest.mark.parametrize('options', [
    {'steps': 0}, {'lr': -1.}, {'lr': math.inf}, {'lr': math.nan}, {'lr_schedule': 'step'}, {'lr_final': 1.5},
    {'weight_decay': -.1}, {'grad_clip': 0.}, {'micro_batch_size': 0}, {'clip_low': -.1}, {'clip_low': 0.}, {'clip_high': 0.}, {'clip_high': math.nan}, {'loss_type': 'mean'},
    {'importance_level': 'word'}, {'kl_estimator': 'k3'}, {'kl_divergence_threshold': 0.}, {'kl_tail_threshold': 0.}, {'kl_spike_factor': -1.}, {'kl_spike_factor': .5}, {'kl_spike_factor': 1.},
    {'grad_clip': None}, {'identity_tolerance': None}, {'max_recoveries': -1}, {'gamma': 1.1}, {'gae_lambda': -.1}, {'value_loss_coef': -1.}, {'clip_low': 2.}, {'entropy_coef': math.nan},
    {'identity_tolerance': 0.}, {'betas': (.9, 1.)}])
def test_bad_settings_name_themselves(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        TrainerConfig(**options)


def test_a_recovery_forgets_the_kl_of_the_policy_that_is_given_up():
    health = Health(kl_mean=.4)
    health.recovery(7)
    assert health.kl_mean is None and not find_failure(health, {'kl': .3}, TrainerConfig(kl_spike_factor=1.5, kl=KLConfig(kl_target=.01)))


def test_the_trainer_only_needs_a_model_and_experiences(model):
    assert isinstance(model, GPT) and Trainer(model).config == TrainerConfig()


# ---- weights that cannot be trained

@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_coarse_weights_are_refused(model, dtype):
    with pytest.raises(SettingError, match=f'{dtype} are too coarse'): Trainer(copy.deepcopy(model).to(dtype), config())


def test_a_frozen_policy_is_refused(model):
    with pytest.raises(SettingError, match='requires a gradient'): Trainer(copy.deepcopy(model).requires_grad_(False), config())


def test_a_double_policy_trains_with_a_critic(model):
    double = copy.deepcopy(model).double()
    rows = list(Trainer(double, config(steps=2, use_gae=True, kl=KLConfig(kl_coef=0.))).run(collector(double, None)))
    assert len(rows) == 2 and all(math.isfinite(row['loss']) for row in rows)


def test_a_restored_trainer_keeps_the_settings_of_its_configuration(model):
    old = Trainer(copy.deepcopy(model), config(weight_decay=.01))
    new = Trainer(copy.deepcopy(model), config(weight_decay=.5, betas=(.5, .6)))
    restore_trainer(new, trainer_state(old))
    assert [group['weight_decay'] for group in new.optimizer.param_groups] == [.5, 0.] and new.optimizer.param_groups[0]['betas'] == (.5, .6)


@pytest.mark.parametrize('replays', [1, 2])
def test_what_was_learned_from_is_let_go(model, replays, monkeypatch):
    made, alive, init = [], [], Experience.__init__
    monkeypatch.setattr(Experience, '__init__', lambda self, *given, **named: made.append(weakref.ref(self)) or init(self, *given, **named))
    trainer = Trainer(model, config(steps=12*replays), copy.deepcopy(model))
    for _ in trainer.run(rollouts=replay(collector(model), replays)): alive.append(sum(ref() is not None for ref in made))
    assert len(alive) == 12*replays <= len(made) and max(alive[4:]) <= max(alive[:4]) <= 3    # memory stays flat


@pytest.mark.parametrize('name, value', [('lr', 'x'), ('lr', math.inf), ('betas', .9), ('betas', (.9, 'x')), ('clip_low', None), ('entropy_coef', math.nan),
                                         ('kl_tail_threshold', 'x'), ('gamma', 2)])
def test_a_setting_that_is_no_number_is_named(name, value):
    with pytest.raises(SettingError, match=re.escape(f'{name}={value!r} must be')): TrainerConfig(**{name: value})


def test_a_recovery_does_not_loosen_the_leash(model):
    "The first KL after it is that of the good state, 0 here, and says nothing about the steps."
    settings = config(steps=5, lr=.1, kl_divergence_threshold=.5, max_recoveries=9, lr_schedule='constant',
                      kl=KLConfig(kl_coef=.02, kl_control='adaptive'))
    trainer = Trainer(model, settings)
    rows = list(trainer.run(collector(model)))
    assert [row['kl'] > .5 for row in rows] == [False, True, False, True, False] and all(abs(row['kl']) < 1e-6 for row in rows[::2])
    assert trainer.kl.kl_coef == .02 and trainer.health.recoveries == 2


def test_more_steps_are_a_new_try_with_tries_of_its_own(model):
    settings = config(steps=30, lr=.1, kl_divergence_threshold=.3, max_recoveries=2, lr_schedule='constant')
    first = Trainer(model, settings)
    list(first.run(replay(collector(model), 2)))
    assert first.diverged and first.health.recoveries == 2
    state = trainer_state(first)
    same, again = (Trainer(model, replace(settings, steps=steps)) for steps in (30, 60))
    for trainer in (same, again): restore_trainer(trainer, state)
    assert same.diverged and same.health.lr_scale == .25
    assert not again.diverged and again.health.lr_scale == .125
    rows = list(again.run(replay(collector(model), 2)))
    assert rows[0]['learning_rate'] == pytest.approx(.1/8) and (again.health.recoveries > 2 or not again.diverged)


def test_a_new_try_forgets_what_the_failed_one_did(model):
    settings = config(steps=4, lr=.1, kl_divergence_threshold=.3, max_recoveries=0, max_skipped=2)
    first = Trainer(model, settings)
    first.remember()
    first.step, first.failure, first.health.in_a_row, first.health.kl_mean = 4, '2 updates in a row', 2, .2
    trainer_module.recover(first)
    assert first.diverged
    again = Trainer(model, replace(settings, steps=8))
    restore_trainer(again, trainer_state(first))
    assert (again.health.in_a_row, again.health.kl_mean, again.health.lr_scale) == (0, None, .5)


def test_rounding_to_bfloat16_is_named_and_an_own_fault_is_not_blamed_on_it(model):
    model.bf16 = True
    experience = next(collector(model))
    part = experience.parts[0]
    for shift, cause in ((.01, 'rounding: products are in bfloat16, which needs an identity_tolerance of 0.1'), (.5, 'positions, masks or cache')):
        rolled = replace(part.rollouts, logprobs=part.rollouts.logprobs + shift*torch.randn_like(part.rollouts.logprobs).sign())
        changed = replace(experience, parts=(replace(part, rollouts=rolled),))
        with pytest.raises(FirstUpdateError, match=f'Likely cause: .*{cause}'): next(Trainer(copy.deepcopy(model), config()).run([changed]))
